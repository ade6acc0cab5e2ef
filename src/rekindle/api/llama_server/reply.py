"""Formats text completions as llama.cpp's server does, whole or in chunks."""

from __future__ import annotations

import codecs
import time
from collections.abc import Iterator
from typing import Any

from msgspec import structs
from starlette.requests import Request

from rekindle.api.base.known_fields import IGNORED_FIELDS_HEADER
from rekindle.api.base.llama_result import (
    final_object,
    generation_settings,
    probabilities,
    prompt_progress,
    prompt_timings,
)
from rekindle.api.base.reply import Reply, ignored_headers, x_cache
from rekindle.api.llama_server.schema import NativeRequest
from rekindle.http.responses import sse_data
from rekindle.protocol.events import (
    AssistantMessage,
    Delta,
    Event,
    Finished,
    Part,
    Prefill,
    Started,
    TextDelta,
)
from rekindle.protocol.requests import GenerateRequest
from rekindle.worker.client import RuntimeClient


class NativeReply(Reply):
    """The answer to /completion or /infill: one object, or a list if several were asked for."""

    def __init__(
        self,
        http: Request,
        runtime: RuntimeClient,
        requests: list[GenerateRequest],
        body: NativeRequest,
    ) -> None:
        headers = ignored_headers({IGNORED_FIELDS_HEADER: body.ignored_fields})
        super().__init__(http, runtime, requests, headers=headers)
        self._body = body
        self._turn_requests = [each for request in requests for each in request.choices()]
        self._states = [_State() for _ in self._turn_requests]

    def add(self, index: int, part: Part) -> None:
        self._states[index].add(part)

    def _record(self, index: int, event: Event) -> None:
        if isinstance(event, Started):
            self._states[index].start(event)
        super()._record(index, event)

    async def body(self) -> Any:
        shown = [self._final(index) for index in range(len(self._states))]
        return shown[0] if len(shown) == 1 else shown

    def chunks(self, index: int, event: Event) -> list[bytes]:
        if isinstance(event, Finished):
            return [sse_data(self._final(index))]
        if isinstance(event, Delta):
            return [sse_data(each) for each in self._partial(index, event.part)]
        if isinstance(event, Started | Prefill) and self._body.progress:
            return [sse_data(self._progress(index, event))]
        return []

    def _partial(self, index: int, part: Part) -> Iterator[dict[str, Any]]:
        assert isinstance(part, TextDelta), "a text completion has no other parts"
        if self._body.predicts_nothing:
            return
        state = self._states[index]
        for text, delta in _by_token(part) if part.logprobs else [(part.text, part)]:
            state.add(delta)
            chunk = {
                "index": index,
                "content": text,
                "tokens": delta.tokens or [],
                "stop": False,
                "id_slot": 0,
                "tokens_predicted": len(state.tokens),
                "tokens_evaluated": state.prompt_tokens,
            }
            if delta.logprobs:
                chunk["completion_probabilities"] = probabilities(delta.logprobs)
            yield chunk

    def _progress(self, index: int, event: Started | Prefill) -> dict[str, Any]:
        state = self._states[index]
        done = state.reused_tokens if isinstance(event, Started) else event.done_tokens
        elapsed_s = time.monotonic() - state.started_s
        progress = prompt_progress(event.prompt_tokens, state.reused_tokens, done, elapsed_s)
        timed = (
            {"timings": prompt_timings(state.reused_tokens, done, elapsed_s)}
            if self._body.timings_per_token
            else {}
        )
        return {
            "index": index,
            "content": "",
            "tokens": [],
            "stop": False,
            "id_slot": 0,
            "tokens_predicted": 0,
            "tokens_evaluated": event.prompt_tokens,
            "prompt_progress": progress,
            **timed,
        }

    def _final(self, index: int) -> dict[str, Any]:
        """The whole answer. In a stream, its last chunk repeats neither text nor tokens."""
        body, state, finished = self._body, self._states[index], self._finished[index]
        streams = bool(body.stream)
        request = self._turn_requests[index]
        settings = generation_settings(request, self._runtime, stream=streams)
        message = state.message
        if body.predicts_nothing:
            settings |= {"n_predict": 0, "max_tokens": 0}
            finished = structs.replace(
                finished, reason="length", stop_string=None, completion_tokens=0, completion_s=0.0
            )
            message = AssistantMessage()
        found = final_object(index, message, finished, settings, self._runtime, state.prompt)
        found["x_cache"] = x_cache([finished])
        shows_tokens = body.return_tokens and not streams and not body.predicts_nothing
        found["tokens"] = state.tokens if shows_tokens else []
        if streams:
            found["content"] = ""
        elif body.n_probs:
            found["completion_probabilities"] = probabilities(message.logprobs)
        return _selected(found, body.response_fields) if not streams else found


class _State:
    """What has arrived of one turn."""

    def __init__(self) -> None:
        self.message = AssistantMessage()
        self.tokens: list[int] = []
        self.prompt: str | None = None
        self.prompt_tokens = 0
        self.reused_tokens = 0
        self.started_s = time.monotonic()

    def start(self, event: Started) -> None:
        self.prompt = event.prompt
        self.prompt_tokens, self.reused_tokens = event.prompt_tokens, event.reused_tokens
        self.started_s = time.monotonic()

    def add(self, part: Part) -> None:
        self.message.add(part)
        if isinstance(part, TextDelta):
            self.tokens += part.tokens or []


def _by_token(part: TextDelta) -> Iterator[tuple[str, TextDelta]]:
    """Split a part that has several tokens, so that each chunk has the probabilities of one.

    The text of a character that is split over tokens comes with the last of them. The last token
    gets the rest of the text, which differs from its pieces if a stop string was cut off.
    """
    logprobs, tokens = part.logprobs or [], part.tokens or []
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    rest = part.text
    for place, each in enumerate(logprobs):
        is_last = place == len(logprobs) - 1
        length = len(rest) if is_last else len(decoder.decode(each.piece))
        text, rest = rest[:length], rest[length:]
        own = tokens[place:] if is_last else tokens[place : place + 1]
        yield text, TextDelta(text, [each], own)


def _selected(found: dict[str, Any], fields: list[str] | None) -> dict[str, Any]:
    """Keep the fields of `response_fields`. `a/b` is the field `b` of the object `a`."""
    if not fields:
        return found
    selected: dict[str, Any] = {}
    for path in fields:
        value: Any = found
        for name in path.split("/"):
            value = value.get(name, _ABSENT) if isinstance(value, dict) else _ABSENT
        if value is not _ABSENT:
            selected[path] = value
    return selected


_ABSENT = object()
