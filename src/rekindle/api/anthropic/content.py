"""The content of a reply, block by block, as its parts come."""

from __future__ import annotations

from typing import Any

import orjson

from rekindle.api.signature import seal, sign
from rekindle.protocol.events import (
    ArgumentsDelta,
    Part,
    ReasoningDelta,
    TextDelta,
    ToolCallStart,
)

Event = dict[str, Any]


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

    def add(self, part: Part) -> list[Event]:
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

    def close(self) -> list[Event]:
        """End the open block, if there is one."""
        if not self._is_open:
            return []
        self._is_open = False
        text, block, events = "".join(self._pieces), self._blocks[-1], list[Event]()
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

    def _opened(self, block: dict[str, Any]) -> list[Event]:
        """What comes before a part of such a block: nothing, if one is open."""
        if self._is_open and self._blocks[-1]["type"] == block["type"]:
            return []
        return [*self.close(), self._open(block)]

    def _open(self, block: dict[str, Any]) -> Event:
        self._blocks.append(block)
        self._pieces, self._is_open = [], True
        return self._event("content_block_start", content_block=dict(block))

    def _delta(self, text: str, kind: str, field: str) -> Event:
        self._pieces.append(text)
        return self._event("content_block_delta", delta={"type": kind, field: text})

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "index": len(self._blocks) - 1, **fields}


def _input(arguments: str) -> dict[str, Any]:
    """A call's arguments; of a call that was cut off, all that the model wrote."""
    try:
        value = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        value = arguments
    return value if isinstance(value, dict) else {"arguments": value}
