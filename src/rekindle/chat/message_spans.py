"""Where each message begins and ends in a rendered conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rekindle.chat.content import Message
from rekindle.chat.placeholders import Sentinels


class Markers:
    """Sentinels around each message's text, found again after rendering."""

    def __init__(self) -> None:
        self._sentinels = Sentinels()

    def place(self, messages: Sequence[Message]) -> list[Message]:
        """The messages, each with its marks; one without text stays as it is."""
        return [
            {**message, "content": self._mark(message.get("content"), index)}
            if message.get("content")
            else message
            for index, message in enumerate(messages)
        ]

    def extents(self, marked: str, text: str) -> dict[int, tuple[int, int]]:
        """Byte offsets in `text` of each message's beginning and end; nothing when the marks
        changed the text."""
        pieces: list[str] = []
        found: dict[int, list[int]] = {}
        at_bytes = 0
        for piece in self._sentinels.split(marked):
            if isinstance(piece, int):
                found.setdefault(piece, []).append(at_bytes)
            else:
                pieces.append(piece)
                at_bytes += len(piece.encode())
        if "".join(pieces) != text:
            return {}
        # A message printed twice has no one place.
        return {
            index: (places[0], places[1]) for index, places in found.items() if len(places) == 2
        }

    def _mark(self, content: Any, index: int) -> Any:
        if isinstance(content, str):
            return self._mark_text(content, index)
        if not isinstance(content, list):
            return content
        parts = list(content)
        texts = [place for place, part in enumerate(parts) if _text(part)]
        for place in texts[:1]:
            parts[place] = {**parts[place], "text": self._mark_start(parts[place]["text"], index)}
        for place in texts[-1:]:
            parts[place] = {**parts[place], "text": self._mark_end(parts[place]["text"], index)}
        return parts

    def _mark_text(self, text: str, index: int) -> str:
        return self._mark_end(self._mark_start(text, index), index) if text.strip() else text

    # Templates trim: the marks must not shield what they would take away.

    def _mark_start(self, text: str, index: int) -> str:
        blanks = len(text) - len(text.lstrip())
        return text[:blanks] + self._sentinels.stand_for(index) + text[blanks:]

    def _mark_end(self, text: str, index: int) -> str:
        body = text.rstrip()
        return body + self._sentinels.stand_for(index) + text[len(body) :]


def _text(part: Any) -> str | None:
    """A part's text, when it has any that is not blank."""
    text = part.get("text") if isinstance(part, Mapping) else None
    return text if isinstance(text, str) and text.strip() else None
