"""Events of turns as one OpenAI answer, whole or streamed; the shapes differ by endpoint."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from rekindle import __version__
from rekindle.api.cache.mismatch import name_mismatch
from rekindle.api.openai.choice import Choice
from rekindle.api.openai.report import usage, x_cache
from rekindle.api.openai.schema import Request
from rekindle.protocol.events import Delta, Event, Finished, Part, Prefill, Started, ToolCallStart
from rekindle.protocol.requests import GenerateRequest
from rekindle.server import sse
from rekindle.server.json import JsonResponse
from rekindle.server.prefill_log import progress
from rekindle.server.runtime_client import RuntimeClient
from rekindle.server.turns import Turns, while_connected


class Shape(Protocol):
    """How one endpoint writes choices."""

    id_prefix: str
    whole: str  # `object` of a whole answer
    chunk: str  # `object` of a streamed chunk

    def opening(self, index: int, *, calls: bool) -> dict[str, Any] | None:
        """What a stream says of a choice before its text, or before the calls it begins with."""

    def delta(self, index: int, part: Part) -> dict[str, Any]: ...

    def closing(self, index: int, finished: Finished) -> dict[str, Any]: ...

    def choice(self, index: int, answer: Choice) -> dict[str, Any]: ...


class Answer:
    """The answer to one HTTP request."""

    def __init__(
        self,
        runtime: RuntimeClient,
        asks: list[GenerateRequest],
        request: Request,
        shape: Shape,
        *,
        others: Sequence[RuntimeClient] = (),
    ) -> None:
        self._runtime = runtime
        self._others = others
        self._asks = asks
        self._request = request
        self._shape = shape
        self._per_prompt = request.n or 1
        self._choices = [Choice() for _ in asks]
        self._opened: set[int] = set()  # choices of a stream that have begun
        self._head = {
            "id": f"{shape.id_prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": runtime.name,
            "system_fingerprint": f"rekindle-{__version__}",
        }

    async def respond(self, http: HttpRequest) -> Response:
        return await (self._streamed(http) if self._request.stream else self._whole(http))

    async def _whole(self, http: HttpRequest) -> Response:
        with contextlib.closing(Turns(self._runtime, self._asks)) as turns:
            await while_connected(http, self._collect(turns))
        return JsonResponse(
            {
                **self._head,
                "object": self._shape.whole,
                "choices": [
                    self._shape.choice(index, choice) for index, choice in enumerate(self._choices)
                ],
                "usage": usage(self._finished(), self._per_prompt),
                "x_cache": x_cache(self._finished(), self._per_prompt),
            }
        )

    async def _collect(self, turns: Turns) -> None:
        while turns.open:
            index, event = await turns.next()
            self._choices[index].add(event)
        await name_mismatch(self._finished(), self._asks[0], self._others)

    async def _streamed(self, http: HttpRequest) -> Response:
        turns = Turns(self._runtime, self._asks)
        try:
            begun = await while_connected(http, turns.begun())
        except BaseException:
            turns.close()
            raise
        return sse.EventStream(self._stream(turns, begun), turns.close)

    async def _stream(
        self, turns: Turns, begun: list[tuple[int, Event]]
    ) -> AsyncGenerator[bytes, None]:
        for index, event in begun:
            for chunk in self._chunks(index, event):
                yield chunk
        while turns.open:
            for chunk in self._chunks(*await turns.next()):
                yield chunk
        await name_mismatch(self._finished(), self._asks[0], self._others)
        for chunk in self._ending():
            yield chunk

    def _chunks(self, index: int, event: Event) -> list[bytes]:
        match event:
            case Delta(_, part):
                delta = self._chunk([self._shape.delta(index, part)])
                return [*self._opening(index, part), delta]
            case Finished():
                self._choices[index].add(event)
                closing = self._chunk([self._shape.closing(index, event)])
                return [*self._opening(index), closing]
            case Started() | Prefill() if self._asks[index].progress:
                return [self._progress(event)]
        return []

    def _opening(self, index: int, part: Part | None = None) -> list[bytes]:
        """What goes before a choice's first piece, which says whether it begins with a call."""
        if index in self._opened:
            return []
        self._opened.add(index)
        opening = self._shape.opening(index, calls=isinstance(part, ToolCallStart))
        return [self._chunk([opening])] if opening else []

    def _progress(self, event: Started | Prefill) -> bytes:
        told = progress(event)
        if self._request.progress == "comments":
            return sse.comment(f"prefill {told['done_tokens']}/{told['prompt_tokens']}")
        return self._chunk([], prefill_progress=told)

    def _ending(self) -> list[bytes]:
        chunks = []
        if self._request.includes_usage:
            chunks.append(self._chunk([], usage=usage(self._finished(), self._per_prompt)))
        if self._request.asks_about_cache:
            # Shaped as a chunk too: OpenAI's Python client yields named events as chunks.
            body = {**self._head, "object": self._shape.chunk, "choices": []}
            report = x_cache(self._finished(), self._per_prompt)
            chunks.append(sse.named("x_cache", {**body, **report}))
        return [*chunks, sse.DONE]

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        body = {**self._head, "object": self._shape.chunk, "choices": choices}
        if self._request.includes_usage:
            body["usage"] = None
        return sse.data({**body, **more})

    def _finished(self) -> list[Finished]:
        return [choice.finished for choice in self._choices if choice.finished]


def finite(logprob: float) -> float:
    """JSON has no infinity; this is OpenAI's own stand-in."""
    return max(logprob, -9999.0)
