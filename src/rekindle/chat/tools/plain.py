"""Replies without any calls."""

from __future__ import annotations

from rekindle.chat.tools.format import ToolFormat
from rekindle.protocol.events import Part, TextDelta


class PlainTextParser:
    """A reply without calls or reasoning: all of it is text, passed on at once."""

    in_reasoning = False
    ended_calls = 0
    is_call_cut = False

    def push(self, text: str) -> list[Part]:
        return [TextDelta(text)] if text else []

    def finish(self, *, cut: bool = False) -> list[Part]:
        return []


FORMATS = (ToolFormat(name="plain", parser=lambda reply: PlainTextParser()),)
