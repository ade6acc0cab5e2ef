"""Replies without any calls."""

from __future__ import annotations

from rekindle.protocol.events import Part, TextDelta


class Plain:
    """Says what comes, as it comes."""

    thinking = False
    ended_calls = 0

    def push(self, text: str) -> list[Part]:
        return [TextDelta(text)] if text else []

    def finish(self) -> list[Part]:
        return []
