"""Formats a reply as a message of Anthropic's API, whole or streamed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from starlette.requests import Request

from rekindle.api.anthropic.caching import diagnostics, input_usage, lifetime_of, usage
from rekindle.api.anthropic.schema import MessagesRequest
from rekindle.api.anthropic.threads import Thread
from rekindle.api.base.reply import Reply, is_complete, x_cache
from rekindle.api.base.signature import seal, sign
from rekindle.http.responses import sse_event
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

SseEvent = dict[str, Any]


class ReplyContent:
    """Converts the parts of a reply to stream events, and collects the blocks of the message.

    One block is open at a time. Its index is its position among the blocks.
    """

    def __init__(self, *, shows_thinking: bool = True) -> None:
        self._shows_thinking = shows_thinking
        self.blocks: list[dict[str, Any]] = []  # complete after `close`
        self._pieces: list[str] = []  # of the open block
        self._is_open = False

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

    def close(self, *, is_cut: bool = False) -> list[SseEvent]:
        """End the open block, if there is one.

        `is_cut` means that the reply was cut off. A call without all of its input is then left out
        of the message. A stream has sent a part of the input, which ends as it is.
        """
        if not self._is_open:
            return []
        self._is_open = False
        text, block, events = "".join(self._pieces), self.blocks[-1], list[SseEvent]()
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
        events.append(self._event("content_block_stop"))
        if is_cut and block["type"] == "tool_use" and not is_complete(text):
            self.blocks.pop()
        return events

    def _opened(self, block: dict[str, Any]) -> list[SseEvent]:
        """Open a block for a part, unless one of this type is open."""
        if self._is_open and self.blocks[-1]["type"] == block["type"]:
            return []
        return [*self.close(), self._open(block)]

    def _open(self, block: dict[str, Any]) -> SseEvent:
        self.blocks.append(block)
        self._pieces, self._is_open = [], True
        return self._event("content_block_start", content_block=dict(block))

    def _delta(self, text: str, kind: str, field: str) -> SseEvent:
        self._pieces.append(text)
        return self._event("content_block_delta", delta={"type": kind, field: text})

    def _event(self, kind: str, **fields: Any) -> SseEvent:
        return {"type": kind, "index": len(self.blocks) - 1, **fields}


def _input(arguments: str) -> dict[str, Any]:
    """Parse a call's arguments. Anything but an object becomes the argument `arguments`."""
    try:
        value = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        value = arguments
    return value if isinstance(value, dict) else {"arguments": value}


class MessageReply(Reply):
    def __init__(
        self,
        http: Request,
        runtime: RuntimeClient,
        request: GenerateRequest,
        body: MessagesRequest,
        message_id: str,
        *,
        headers: Mapping[str, str],
        thread: Thread | None = None,
    ) -> None:
        super().__init__(http, runtime, [request], headers=headers)
        self._body = body
        self._thread = thread
        self._lifetime = lifetime_of(body)
        omitted = body.thinking is not None and body.thinking.display == "omitted"
        self._content = ReplyContent(shows_thinking=not omitted)
        self._message: dict[str, Any] = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": runtime.name,
        }

    def add(self, index: int, part: Part) -> None:
        self._content.add(part)

    async def body(self) -> dict[str, Any]:
        [finished] = self.finished
        self._content.close(is_cut=finished.reason != "tool_calls")
        await self._keep_thread()
        return {
            **self._message,
            "content": self._content.blocks,
            **self._end_fields(finished),
            "usage": usage(finished, self._lifetime),
            "diagnostics": self._diagnostics(finished.prompt_tokens, finished.cache),
            "x_cache": x_cache([finished]),
        }

    def chunks(self, index: int, event: Event) -> list[bytes]:
        match event:
            case Delta(_, part):
                return [sse_event(each["type"], each) for each in self._content.add(part)]
            case Started():
                return [self._message_start(event)]
            case Finished():
                closed = self._content.close(is_cut=event.reason != "tool_calls")
                blocks = [sse_event(each["type"], each) for each in closed]
                return [*blocks, self._message_delta(event)]
        return []

    async def end(self) -> bytes:
        await self._keep_thread()  # before the client can continue the thread
        return _event("message_stop")

    async def _keep_thread(self) -> None:
        if self._thread is not None:
            message_id, content = self._message["id"], self._content.blocks
            await self._thread.keep(self._http, self._runtime, message_id, content)

    def keep_alive(self) -> bytes:
        return _event("ping")

    def _message_start(self, started: Started) -> bytes:
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
            delta=self._end_fields(finished),
            usage=usage(finished, self._lifetime),
            x_cache=x_cache([finished]),
        )

    def _diagnostics(self, prompt_tokens: int, cache: CacheReport | None) -> dict[str, Any] | None:
        if self._body.diagnostics is None or cache is None:
            return None
        previous = self._body.diagnostics.previous_message_id
        return diagnostics(previous, self._runtime.name, prompt_tokens, cache)

    def _end_fields(self, finished: Finished) -> dict[str, Any]:
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
