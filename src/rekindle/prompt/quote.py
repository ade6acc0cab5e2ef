"""Keeping what a client wrote apart from the control tokens a template writes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from rekindle.errors import BadRequest
from rekindle.prompt.sentinel import Sentinels

DEPTH_LIMIT = 100


class Span(NamedTuple):
    """A stretch of a prompt; control-token text in a literal one is only text."""

    text: str
    literal: bool


class ControlTexts:
    """The texts a vocabulary reads as control tokens."""

    def __init__(self, texts: Iterable[str]) -> None:
        known = sorted({text for text in texts if text})
        self._whole = re.compile(_any_of(known))
        self._first = re.compile(_any_of(sorted({text[0] for text in known})))
        self._beginnings = {text[:length] for text in known for length in range(1, len(text))}
        self._longest = max(map(len, known), default=0)

    def split(self, text: str) -> Iterator[Span]:
        """The text in spans, literal where it is a control token's or could be made into one."""
        at = 0
        for match in self._whole.finditer(text):
            yield Span(text[at : match.start()], literal=False)
            yield Span(match[0], literal=True)
            at = match.end()
        rest = text[at:]
        tail = self._tail(rest)
        yield Span(rest[: len(rest) - len(tail)], literal=False)
        yield Span(tail, literal=True)

    def _tail(self, text: str) -> str:
        """The end of `text` that begins a control text: the next string may hold the rest."""
        window = text[-self._longest :]
        for match in self._first.finditer(window):
            if window[match.start() :] in self._beginnings:
                return window[match.start() :]
        return ""


class Quotes:
    """Control-token text of one conversation: out of the template's sight, then back as text."""

    def __init__(self, control: ControlTexts) -> None:
        self._control = control
        self._sentinels = Sentinels()
        self._literals: list[str] = []

    def hide(self, value: Any, depth: int = 0) -> Any:
        """A copy of `value`, a sentinel in place of control-token text in every string of it."""
        if depth > DEPTH_LIMIT:
            raise BadRequest(f"The messages are nested more than {DEPTH_LIMIT} deep.")
        if isinstance(value, str):
            return self._hide_text(value)
        if isinstance(value, Mapping):
            return {
                self.hide(key, depth): self.hide(item, depth + 1) for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.hide(item, depth + 1) for item in value]
        return value

    def spans(self, rendered: str) -> list[Span]:
        """The rendered text with its literals back in place; one span when there are none."""
        return [
            Span(self._literals[piece], literal=True)
            if isinstance(piece, int)
            else Span(piece, literal=False)
            for piece in self._sentinels.split(rendered)
            if piece != ""
        ]

    def restore(self, rendered: str) -> str:
        return "".join(span.text for span in self.spans(rendered))

    def _hide_text(self, text: str) -> str:
        return "".join(
            self._sentinel(span.text) if span.literal and span.text else span.text
            for span in self._control.split(text)
        )

    def _sentinel(self, literal: str) -> str:
        self._literals.append(literal)
        return self._sentinels.stand_for(len(self._literals) - 1)


def _any_of(texts: list[str]) -> str:
    """A pattern for the longest of the sorted `texts`; of thousands, few are tried anywhere."""
    if not texts:
        return r"(?!)"
    if len(texts) == 1:
        return re.escape(texts[0])
    shared = _shared_length(texts[0], texts[-1])  # sorted: these two differ the earliest
    rests = [text[shared:] for text in texts]
    branches = [_any_of(list(group)) for _, group in groupby(filter(None, rests), itemgetter(0))]
    optional = "?" if "" in rests else ""
    return f"{re.escape(texts[0][:shared])}(?:{'|'.join(branches)}){optional}"


def _shared_length(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
