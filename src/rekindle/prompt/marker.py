"""Where each message ends in a rendered conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rekindle.prompt.content import Message
from rekindle.prompt.sentinel import Sentinels


class Markers:
    """Sentinels at the end of each message's text, found again after rendering."""

    def __init__(self) -> None:
        self._sentinels = Sentinels()

    def place(self, messages: Sequence[Message]) -> list[Message]:
        """The messages, each with its mark; one without text stays as it is."""
        return [
            {**message, "content": self._mark(message.get("content"), index)}
            if message.get("content")
            else message
            for index, message in enumerate(messages)
        ]

    def ends(self, marked: str, text: str) -> dict[int, int]:
        """Byte offset in `text` of each message's end; nothing when the marks changed the text."""
        pieces: list[str] = []
        ends: dict[int, list[int]] = {}
        at_bytes = 0
        for piece in self._sentinels.split(marked):
            if isinstance(piece, int):
                ends.setdefault(piece, []).append(at_bytes)
            else:
                pieces.append(piece)
                at_bytes += len(piece.encode())
        if "".join(pieces) != text:
            return {}
        # A message printed twice has no one end.
        return {index: places[0] for index, places in ends.items() if len(places) == 1}

    def _mark(self, content: Any, index: int) -> Any:
        if isinstance(content, str):
            return self._mark_text(content, index)
        if not isinstance(content, list):
            return content
        parts = list(content)
        for place in reversed(range(len(parts))):
            if text := _text(parts[place]):
                parts[place] = {**parts[place], "text": self._mark_text(text, index)}
                break
        return parts

    def _mark_text(self, text: str, index: int) -> str:
        body = text.rstrip()  # templates trim: the mark must not shield what they would take away
        return body + self._sentinels.stand_for(index) + text[len(body) :] if body else text


def _text(part: Any) -> str | None:
    """A part's text, when it has any that is not blank."""
    text = part.get("text") if isinstance(part, Mapping) else None
    return text if isinstance(text, str) and text.strip() else None
