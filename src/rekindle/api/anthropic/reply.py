"""Events of a turn as one message of Anthropic's API, whole or streamed."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from rekindle.api.anthropic.caching import Lifetime, diagnostics, input_usage, usage
from rekindle.api.anthropic.schema import MessagesRequest
from rekindle.api.base.report import log_line, x_cache
from rekindle.api.base.signature import seal, sign
from rekindle.api.base.turns import Turns, while_connected, write_on_arrival
from rekindle.http.middleware import received_s
from rekindle.http.responses import EventStream, JsonResponse, SignOfLife, sse_event
from rekindle.protocol.events import (
    ArgumentsDelta,
    CacheReport,
    Delta,
    Event,
    Finished,
    Part,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCallStart,
)
from rekindle.protocol.requests import GenerateRequest
from rekindle.worker.client import RuntimeClient

# ----------------------------------------------------------------------
# The content of a reply, block by block, as its parts come.

SseEvent = dict[str, Any]


class ReplyContent:
    """Takes the parts of one reply; gives the events of a stream, and the blocks of a message.

    One block is open at a time, and its index is its place among the blocks.
    """

    def __init__(self, *, shows_thinking: bool = True) -> None:
        self._shows_thinking = shows_thinking
        self._blocks: list[dict[str, Any]] = []
        self._pieces: list[str] = []  # of the open block
        self._is_open = False

    @property
    def blocks(self) -> list[dict[str, Any]]:
        """All of them, once the last one was closed."""
        assert not self._is_open
        return self._blocks

    def add(self, part: Part) -> list[SseEvent]:
        match part:
            case TextDelta(text):
                if not text:
                    return []
                events = self._opened({"type": "text", "text": ""})
                return [*events, self._delta(text, "text_delta", "text")]
            case ReasoningDelta(text):
                events = self._opened({"type": "thinking", "thinking": "", "signature": ""})
                delta = self._delta(text, "thinking_delta", "thinking")
                return [*events, delta] if self._shows_thinking else events
            case ToolCallStart(_, name, id):
                closed = self.close()
                block = {"type": "tool_use", "id": id, "name": name, "input": {}}
                return [*closed, self._open(block)]
            case ArgumentsDelta(_, text):
                return [self._delta(text, "input_json_delta", "partial_json")]

    def close(self) -> list[SseEvent]:
        """End the open block, if there is one."""
        if not self._is_open:
            return []
        self._is_open = False
        text, block, events = "".join(self._pieces), self._blocks[-1], list[SseEvent]()
        match block["type"]:
            case "text":
                block["text"] = text
            case "thinking":
                block["signature"] = sign(text) if self._shows_thinking else seal(text)
                block["thinking"] = text if self._shows_thinking else ""
                signature = {"type": "signature_delta", "signature": block["signature"]}
                events = [self._event("content_block_delta", delta=signature)]
            case "tool_use":
                block["input"] = _input(text)
        return [*events, self._event("content_block_stop")]

    def _opened(self, block: dict[str, Any]) -> list[SseEvent]:
        """What comes before a part of such a block: nothing, if one is open."""
        if self._is_open and self._blocks[-1]["type"] == block["type"]:
            return []
        return [*self.close(), self._open(block)]

    def _open(self, block: dict[str, Any]) -> SseEvent:
        self._blocks.append(block)
        self._pieces, self._is_open = [], True
        return self._event("content_block_start", content_block=dict(block))

    def _delta(self, text: str, kind: str, field: str) -> SseEvent:
        self._pieces.append(text)
        return self._event("content_block_delta", delta={"type": kind, field: text})

    def _event(self, kind: str, **fields: Any) -> SseEvent:
        return {"type": kind, "index": len(self._blocks) - 1, **fields}


def _input(arguments: str) -> dict[str, Any]:
    """A call's arguments; of a call that was cut off, all that the model wrote."""
    try:
        value = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        value = arguments
    return value if isinstance(value, dict) else {"arguments": value}


log = logging.getLogger("rekindle.turn")

PING_S = 10.0  # of silence; clients warn their users after 20
PING = sse_event("ping", {"type": "ping"})


class Answer:
    """The answer to one HTTP request."""

    def __init__(
        self,
        runtime: RuntimeClient,
        request: GenerateRequest,
        body: MessagesRequest,
        message_id: str,
        *,
        lifetime: Lifetime | None,
        headers: dict[str, str],
    ) -> None:
        self._runtime = runtime
        self._request = request
        self._body = body
        self._lifetime = lifetime
        self._headers = headers
        omitted = body.thinking is not None and body.thinking.display == "omitted"
        self._content = ReplyContent(shows_thinking=not omitted)
        self._message: dict[str, Any] = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": runtime.name,
        }

    async def respond(self, http: Request) -> Response:
        return await (self._streamed(http) if self._body.stream else self._whole(http))

    # -- whole ---------------------------------------------------------------------------------

    async def _whole(self, http: Request) -> Response:
        with contextlib.closing(self._turns(http)) as turns:
            finished = await while_connected(http, self._collect(turns))
        message = {
            **self._message,
            "content": self._content.blocks,
            **self._end(finished),
            "usage": usage(finished, self._lifetime),
            "diagnostics": self._diagnostics(finished.prompt_tokens, finished.cache),
            "x_cache": x_cache([finished]),
        }
        return JsonResponse(message, headers=self._headers)

    async def _collect(self, turns: Turns) -> Finished:
        while True:
            _, event = await turns.next()
            match event:
                case Delta(_, part):
                    self._content.add(part)
                case Finished():
                    self._content.close()
                    log.info("%s", log_line(event))
                    return event

    # -- streamed ------------------------------------------------------------------------------

    async def _streamed(self, http: Request) -> Response:
        turns = self._turns(http)
        try:
            begun = await while_connected(http, turns.begun_within(PING_S))
        except BaseException:
            turns.close()
            raise
        pings = SignOfLife(PING_S, lambda: PING)
        stream = EventStream(
            self._stream(turns, begun), turns.close, self._headers, sign_of_life=pings
        )
        return write_on_arrival(turns, stream, self._joined)

    async def _stream(
        self, turns: Turns, begun: list[tuple[int, Event]]
    ) -> AsyncGenerator[bytes, None]:
        if not begun:
            yield PING
        if begun:
            yield self._joined(begun)
        while turns.open:
            if chunks := self._joined(await turns.arrived()):
                yield chunks

    def _joined(self, events: list[tuple[int, Event]]) -> bytes:
        return b"".join(chunk for _, event in events for chunk in self._chunks(event))

    def _chunks(self, event: Event) -> list[bytes]:
        match event:
            case Delta(_, part):
                return [sse_event(each["type"], each) for each in self._content.add(part)]
            case Started():
                return [self._start(event)]
            case Finished():
                log.info("%s", log_line(event))
                blocks = [sse_event(each["type"], each) for each in self._content.close()]
                return [*blocks, self._message_delta(event), _event("message_stop")]
        return []

    def _start(self, started: Started) -> bytes:
        known = input_usage(started.prompt_tokens, started.reused_tokens, self._lifetime)
        message = {
            **self._message,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**known, "output_tokens": 0},
            "diagnostics": self._diagnostics(started.prompt_tokens, started.cache),
        }
        return _event("message_start", message=message)

    def _message_delta(self, finished: Finished) -> bytes:
        return _event(
            "message_delta",
            delta=self._end(finished),
            usage=usage(finished, self._lifetime),
            x_cache=x_cache([finished]),
        )

    # -- both ----------------------------------------------------------------------------------

    def _turns(self, http: Request) -> Turns:
        return Turns(self._runtime, [self._request], received_s(http))

    def _diagnostics(self, prompt_tokens: int, cache: CacheReport | None) -> dict[str, Any] | None:
        if self._body.diagnostics is None or cache is None:
            return None
        previous = self._body.diagnostics.previous_message_id
        return diagnostics(previous, self._runtime.name, prompt_tokens, cache)

    def _end(self, finished: Finished) -> dict[str, Any]:
        """Why the reply ends here."""
        stopped = finished.stop_string
        reason = {"stop": "end_turn", "tool_calls": "tool_use"}.get(finished.reason, "max_tokens")
        if finished.reason == "length" and finished.completion_tokens < self._body.max_tokens:
            reason = "model_context_window_exceeded"
        if finished.reason == "stop" and stopped is not None:
            reason = "stop_sequence"
        sequence = stopped if reason == "stop_sequence" else None
        return {"stop_reason": reason, "stop_sequence": sequence}


def _event(kind: str, **fields: Any) -> bytes:
    return sse_event(kind, {"type": kind, **fields})
