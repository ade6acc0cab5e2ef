"""Events of turns as one answer of OpenAI's API, whole or streamed; endpoints differ in format."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response

from rekindle.api.base.admin import refine_report
from rekindle.api.base.report import log_line, x_cache
from rekindle.api.base.turns import Turns, while_connected, write_on_arrival
from rekindle.api.openai.schema import RequestBase
from rekindle.http.middleware import received_s
from rekindle.http.responses import (
    SSE_DONE,
    EventStream,
    EventTemplate,
    JsonResponse,
    sse_comment,
    sse_data,
    sse_event,
)
from rekindle.protocol.events import (
    AssistantMessage,
    Delta,
    Event,
    Finished,
    Part,
    Prefill,
    Started,
    TextDelta,
    ToolCallStart,
)
from rekindle.protocol.requests import GenerateRequest
from rekindle.version import __version__
from rekindle.worker.client import RuntimeClient

# ----------------------------------------------------------------------
# `usage` of an answer: what it cost.


def usage(
    turns: Sequence[Finished], choices: int, first_byte_at_s: float | None = None
) -> dict[str, Any]:
    """A prompt with several choices counts once."""
    prompts = turns[::choices]
    prompt_tokens = sum(turn.prompt_tokens for turn in prompts)
    completion_tokens = sum(turn.completion_tokens for turn in turns)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(turn.cache.reused_tokens for turn in prompts)
        },
        "completion_tokens_details": {
            "reasoning_tokens": sum(turn.reasoning_tokens for turn in turns)
        },
        "prompt_eval_time": round(sum(turn.prompt_eval_s for turn in prompts), 6),
        **_first_token_time(turns[0], first_byte_at_s),
    }


def timings(turns: Sequence[Finished], choices: int) -> dict[str, Any]:
    """The same as llama.cpp's server tells it: tokens, milliseconds and speeds."""
    prompts = turns[::choices]
    reused = sum(turn.cache.reused_tokens for turn in prompts)
    computed = sum(turn.prompt_tokens for turn in prompts) - reused
    generated = sum(turn.completion_tokens for turn in turns)
    return {
        "cache_n": reused,
        **_speed("prompt", computed, sum(turn.prompt_eval_s for turn in prompts)),
        **_speed("predicted", generated, sum(turn.completion_s for turn in turns)),
    }


def _speed(what: str, tokens: int, seconds: float) -> dict[str, Any]:
    ms = seconds * 1000
    return {
        f"{what}_n": tokens,
        f"{what}_ms": round(ms, 3),
        f"{what}_per_token_ms": round(ms / tokens, 6) if tokens else 0.0,
        f"{what}_per_second": round(tokens / seconds, 3) if seconds else 0.0,
    }


def _first_token_time(turn: Finished, first_byte_at_s: float | None) -> dict[str, Any]:
    """Seconds of each stage up to the first token, and in a stream up to the first byte of it."""
    if turn.stages is None:
        return {}
    stages = structs.asdict(turn.stages)
    if first_byte_at_s is not None and turn.first_token_at_s is not None:
        stages["first_byte"] = first_byte_at_s - turn.first_token_at_s
    return {"first_token_time": {stage: round(spent, 6) for stage, spent in stages.items()}}


log = logging.getLogger("rekindle.turn")


class Choice:
    """Collects the events of one turn."""

    def __init__(self) -> None:
        self.message = AssistantMessage()
        self.finished: Finished | None = None

    def add(self, event: Event) -> None:
        match event:
            case Delta(_, part):
                self.message.add(part)
            case Finished():
                self.finished = event
                log.info("%s", log_line(event))


class AnswerFormat(Protocol):
    """How one endpoint writes choices."""

    id_prefix: str
    whole: str  # `object` of a whole answer
    chunk: str  # `object` of a streamed chunk

    def opening(self, index: int, *, calls: bool) -> dict[str, Any] | None:
        """What a stream sends of a choice before its first part, which may be a call."""

    def delta(self, index: int, part: Part) -> dict[str, Any]: ...

    def closing(self, index: int, finished: Finished) -> dict[str, Any]: ...

    def choice(self, index: int, choice: Choice) -> dict[str, Any]: ...


class Answer:
    """The answer to one HTTP request."""

    def __init__(
        self,
        runtime: RuntimeClient,
        requests: list[GenerateRequest],
        body: RequestBase,
        format: AnswerFormat,
        *,
        others: Sequence[RuntimeClient] = (),
    ) -> None:
        self._runtime = runtime
        self._others = others
        self._requests = requests
        self._body = body
        self._format = format
        self._per_prompt = body.n or 1
        self._choices = [Choice() for request in requests for _ in request.turns]
        self._first_byte_at_s: float | None = None  # of a stream
        self._opened: set[int] = set()  # choices of a stream that have begun
        self._texts: dict[int, EventTemplate] = {}  # by choice
        self._common_fields = {
            "id": f"{format.id_prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": runtime.name,
            "system_fingerprint": f"rekindle-{__version__}",
        }

    async def respond(self, http: Request) -> Response:
        return await (self._streamed(http) if self._body.stream else self._whole(http))

    async def _whole(self, http: Request) -> Response:
        with contextlib.closing(Turns(self._runtime, self._requests, received_s(http))) as turns:
            await while_connected(http, self._collect(turns))
        return JsonResponse(
            {
                **self._common_fields,
                "object": self._format.whole,
                "choices": [
                    self._format.choice(index, choice) for index, choice in enumerate(self._choices)
                ],
                "usage": usage(self._finished(), self._per_prompt),
                "x_cache": x_cache(self._finished(), self._per_prompt),
                "timings": timings(self._finished(), self._per_prompt),
            }
        )

    async def _collect(self, turns: Turns) -> None:
        while turns.open:
            index, event = await turns.next()
            self._choices[index].add(event)
        await refine_report(self._finished(), self._requests[0], self._others)

    async def _streamed(self, http: Request) -> Response:
        turns = Turns(self._runtime, self._requests, received_s(http))
        try:
            begun = await while_connected(http, turns.begun())
        except BaseException:
            turns.close()
            raise
        stream = EventStream(self._stream(turns, begun), turns.close)
        return write_on_arrival(turns, stream, self._joined)

    async def _stream(
        self, turns: Turns, begun: list[tuple[int, Event]]
    ) -> AsyncGenerator[bytes, None]:
        if chunks := self._joined(begun):
            yield chunks
        while turns.open:
            if chunks := self._joined(await turns.arrived()):
                yield chunks
        await refine_report(self._finished(), self._requests[0], self._others)
        yield b"".join(self._ending())

    def _joined(self, events: list[tuple[int, Event]]) -> bytes:
        """What is sent of these events: each write costs as much as all else about a token."""
        return b"".join(chunk for each in events for chunk in self._chunks(*each))

    def _chunks(self, index: int, event: Event) -> list[bytes]:
        match event:
            case Delta(_, part):
                self._first_byte_at_s = self._first_byte_at_s or time.monotonic()
                return [*self._opening(index, part), self._delta(index, part)]
            case Finished():
                self._choices[index].add(event)
                closing = self._chunk(
                    [self._format.closing(index, event)], timings=timings([event], 1)
                )
                return [*self._opening(index), closing]
            case Started() | Prefill() if self._body.progress:
                return [self._progress(event)]
        return []

    def _opening(self, index: int, part: Part | None = None) -> list[bytes]:
        if index in self._opened:
            return []
        self._opened.add(index)
        opening = self._format.opening(index, calls=isinstance(part, ToolCallStart))
        return [self._chunk([opening])] if opening else []

    def _delta(self, index: int, part: Part) -> bytes:
        if not isinstance(part, TextDelta) or part.logprobs is not None:
            return self._chunk([self._format.delta(index, part)])
        if index not in self._texts:
            self._texts[index] = EventTemplate(
                lambda text: self._chunk([self._format.delta(index, TextDelta(text))])
            )
        return self._texts[index].event(part.text)

    def _progress(self, event: Started | Prefill) -> bytes:
        done = event.reused_tokens if isinstance(event, Started) else event.done_tokens
        if self._body.progress == "comments":
            return sse_comment(f"prefill {done}/{event.prompt_tokens}")
        progress = {"done_tokens": done, "prompt_tokens": event.prompt_tokens}
        return self._chunk([], prefill_progress=progress)

    def _ending(self) -> list[bytes]:
        chunks = []
        if self._body.includes_usage:
            cost = usage(self._finished(), self._per_prompt, self._first_byte_at_s)
            chunks.append(self._chunk([], usage=cost))
        if self._body.reports_cache:
            # In a chunk's format too: OpenAI's Python client yields named events as chunks.
            chunk = {**self._common_fields, "object": self._format.chunk, "choices": []}
            report = x_cache(self._finished(), self._per_prompt)
            chunks.append(sse_event("x_cache", {**chunk, **report}))
        return [*chunks, SSE_DONE]

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        chunk = {**self._common_fields, "object": self._format.chunk, "choices": choices}
        if self._body.includes_usage:
            chunk["usage"] = None
        return sse_data({**chunk, **more})

    def _finished(self) -> list[Finished]:
        return [choice.finished for choice in self._choices if choice.finished]
