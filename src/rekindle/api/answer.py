"""Events of turns as one OpenAI answer, whole or streamed; the shapes differ by endpoint."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from rekindle import __version__
from rekindle.api import sse
from rekindle.api.json import JsonResponse
from rekindle.api.schema import Request
from rekindle.api.turns import Turns, while_connected
from rekindle.events import CacheReport, Event, Finished, Prefill, Started, Text, TokenLog
from rekindle.runtime.process import Runtime
from rekindle.runtime.wire import Ask


class Shape(Protocol):
    """How one endpoint writes choices."""

    id_prefix: str
    whole: str  # `object` of a whole answer
    chunk: str  # `object` of a streamed chunk

    def opening(self, index: int) -> dict[str, Any] | None:
        """What a stream says of a choice before its text, if anything."""

    def delta(self, index: int, text: str, logs: list[TokenLog] | None) -> dict[str, Any]: ...

    def closing(self, index: int, reason: str) -> dict[str, Any]: ...

    def choice(self, index: int, answer: Choice) -> dict[str, Any]: ...


@dataclass(slots=True)
class Choice:
    """One turn's answer as it grows."""

    text: str = ""
    logs: list[TokenLog] = field(default_factory=list)
    finished: Finished | None = None

    def add(self, event: Event) -> None:
        match event:
            case Text(_, text, logs):
                self.text += text
                self.logs += logs or []
            case Finished():
                self.finished = event


class Answer:
    """The answer to one HTTP request."""

    def __init__(self, runtime: Runtime, asks: list[Ask], request: Request, shape: Shape) -> None:
        self._runtime = runtime
        self._asks = asks
        self._request = request
        self._shape = shape
        self._choices = [Choice() for _ in asks]
        self._head = {
            "id": f"{shape.id_prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": runtime.name,
            "system_fingerprint": f"rekindle-{__version__}",
        }

    async def respond(self, http: HttpRequest) -> Response:
        if not self._request.stream:
            return JsonResponse(await while_connected(http, self._whole()))
        turns = Turns(self._runtime, self._asks)
        await turns.__aenter__()
        try:
            begun = await while_connected(http, turns.started())
        except BaseException:
            await turns.__aexit__(None, None, None)
            raise
        return sse.EventStream(self._stream(turns, begun))

    async def _whole(self) -> dict[str, Any]:
        async with Turns(self._runtime, self._asks) as turns:
            async for index, event in turns.events():
                self._choices[index].add(event)
        return {
            **self._head,
            "object": self._shape.whole,
            "choices": [
                self._shape.choice(index, choice) for index, choice in enumerate(self._choices)
            ],
            "usage": self._usage(),
            "x_cache": self._x_cache(),
        }

    async def _stream(self, turns: Turns, begun: list[tuple[int, Event]]) -> AsyncIterator[bytes]:
        try:
            for index in range(len(self._asks)):
                if opening := self._shape.opening(index):
                    yield self._chunk([opening])
            for index, event in begun:
                for chunk in self._chunks(index, event):
                    yield chunk
            async for index, event in turns.events():
                for chunk in self._chunks(index, event):
                    yield chunk
            for chunk in self._ending():
                yield chunk
        finally:
            await turns.__aexit__(None, None, None)

    def _chunks(self, index: int, event: Event) -> list[bytes]:
        self._choices[index].add(event)
        match event:
            case Text(_, text, logs):
                return [self._chunk([self._shape.delta(index, text, logs)])]
            case Finished():
                return [self._chunk([self._shape.closing(index, event.reason)])]
            case Started() | Prefill() if self._asks[index].progress:
                return [self._chunk([], prefill_progress=_progress(event))]
        return []

    def _ending(self) -> list[bytes]:
        chunks = []
        if self._request.includes_usage:
            chunks.append(self._chunk([], usage=self._usage()))
        if self._request.asks_about_cache:
            # Shaped as a chunk too: OpenAI's Python client yields named events as chunks.
            body = {**self._head, "object": self._shape.chunk, "choices": [], **self._x_cache()}
            chunks.append(sse.named("x_cache", body))
        return [*chunks, sse.DONE]

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        body = {**self._head, "object": self._shape.chunk, "choices": choices}
        if self._request.includes_usage:
            body["usage"] = None
        return sse.data({**body, **more})

    def _finished(self) -> list[Finished]:
        return [choice.finished for choice in self._choices if choice.finished]

    def _usage(self) -> dict[str, Any]:
        """A prompt asked for several choices counts once."""
        finished = self._finished()
        prompts = finished[:: self._request.n or 1]
        prompt_tokens = sum(turn.prompt_tokens for turn in prompts)
        completion_tokens = sum(turn.completion_tokens for turn in finished)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": sum(turn.cache.reused_tokens for turn in prompts)
            },
            "prompt_eval_time": round(sum(turn.prompt_eval_s for turn in prompts), 6),
        }

    def _x_cache(self) -> dict[str, Any]:
        """The first choice's report; the others share its prompt."""
        report: CacheReport = self._finished()[0].cache
        return {
            "hit": report.status != "miss",
            "status": report.status,
            "reused_tokens": report.reused_tokens,
            "cached_tokens": report.cached_tokens,
            "reason": report.reason,
            "tier": report.tier,
        }


def _progress(event: Started | Prefill) -> dict[str, int]:
    done = event.reused_tokens if isinstance(event, Started) else event.done_tokens
    return {"done_tokens": done, "prompt_tokens": event.prompt_tokens}
