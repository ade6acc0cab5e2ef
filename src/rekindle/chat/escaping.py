"""Escaping: keeps text that a client wrote apart from control tokens that the template writes.

Escaped bytes are the text of a prompt in UTF-8, with every literal (text that looks like a control
token, or could become one, but is only text) between two bytes that UTF-8 never uses, and the
text that stands for a picture between two others.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from rekindle.errors import BadRequest
from rekindle.protocol.nesting import depth_exceeds
from rekindle.tokens import common_length

DEPTH_LIMIT = 100
OPEN, CLOSE = b"\xff", b"\xfe"  # around a literal; UTF-8 has neither
PICTURE, PICTURE_END = b"\xfd", b"\xfc"  # around what stands for a picture; nor has it these
DELIMITER = re.compile(b"([\xff\xfe\xfd\xfc])")
CHARACTER_BYTES = 4  # of UTF-8, at most

# Every character is private-use: no filter of case or whitespace changes a placeholder.
DIGITS = "0123456789abcdef"
PRIVATE = "".join(map(chr, range(0xF0000, 0xF0010)))
WIDTH = 8
NUMBER = re.compile(f"[{PRIVATE}]{{{WIDTH}}}")
TO_PRIVATE = str.maketrans(DIGITS, PRIVATE)
FROM_PRIVATE = str.maketrans(PRIVATE, DIGITS)


class Span(NamedTuple):
    """A part of a prompt's text; in a literal one, the text of a control token is only text. One
    that stands for a picture is text to people alone."""

    text: str
    literal: bool
    picture: bool = False


class ControlTexts:
    """The texts that a vocabulary reads as control tokens."""

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

    def across(self, before: str, after: str) -> bool:
        """Whether the two, put side by side, hold a control text that neither holds alone."""
        seam = min(len(before), self._longest)
        window = before[len(before) - seam :] + after[: self._longest]
        starts = (first.start() for first in self._first.finditer(window, 0, seam))
        whole = (self._whole.match(window, start) for start in starts)
        return any(match is not None and match.end() > seam for match in whole)

    def cut_at(self, escaped: bytes, at: int) -> bool:
        """Whether `at` is inside a control text that the template wrote."""
        reach = CHARACTER_BYTES * self._longest
        before = DELIMITER.split(escaped[max(0, at - reach) : at])[-1]
        after = DELIMITER.split(escaped[at : at + reach])[0]
        return not _is_open(escaped, at) and self.across(
            before.decode(errors="ignore"), after.decode(errors="ignore")
        )

    def _tail(self, text: str) -> str:
        """The end of `text` that begins a control text: the next string may hold the rest."""
        window = text[-self._longest :]
        for match in self._first.finditer(window):
            if window[match.start() :] in self._beginnings:
                return window[match.start() :]
        return ""


class Placeholders:
    """Numbers as opaque text; a random prefix that no user can guess sets them apart."""

    def __init__(self) -> None:
        self._prefix = secrets.token_hex(8).translate(TO_PRIVATE)

    def of(self, number: int) -> str:
        return self._prefix + f"{number:0{WIDTH}x}".translate(TO_PRIVATE)

    def split(self, text: str) -> Iterator[str | int]:
        """The text and the numbers in it, in order; a truncated placeholder is left out."""
        first, *rest = text.split(self._prefix)
        yield first
        for piece in rest:
            if number := NUMBER.match(piece):
                yield int(number[0].translate(FROM_PRIVATE), 16)
                piece = piece[WIDTH:]
            yield piece


class Escaper:
    """Hides the literals of one conversation from its template, and puts them back as text."""

    def __init__(self, control: ControlTexts) -> None:
        self._control = control
        self._placeholders = Placeholders()
        self._hidden_spans: list[Span] = []

    @property
    def literals(self) -> int:
        """How many it has hidden so far, pictures included."""
        return len(self._hidden_spans)

    def place_picture(self, text: str) -> str:
        """A placeholder where a picture is to be, for which `text` stands."""
        return self._placeholder(Span(text, literal=False, picture=True))

    def hide(self, value: Any) -> Any:
        """A copy of `value`, a placeholder for each literal in every string of it."""
        if depth_exceeds(value, DEPTH_LIMIT + 1):  # the value itself is not nested
            raise BadRequest(f"The messages are nested more than {DEPTH_LIMIT} deep.")
        return self._hidden(value)

    def hide_each(self, values: Sequence[Any], plain: Set[int]) -> tuple[list[Any], frozenset[int]]:
        """The same of each value; those at the places `plain`, known to hold no literal, stay as
        they are. And the places of those that hold none."""
        hidden, found = list(values), set(plain)
        for place in sorted(set(range(len(hidden))) - found):
            before = self.literals
            hidden[place] = self.hide([hidden[place]])[0]
            if self.literals == before:
                found.add(place)
        return hidden, frozenset(found)

    def spans(self, rendered: str) -> list[Span]:
        """The rendered text with its literals back in place; one span when there are none."""
        return [
            self._hidden_spans[piece] if isinstance(piece, int) else Span(piece, literal=False)
            for piece in self._placeholders.split(rendered)
            if piece != ""
        ]

    def restore(self, rendered: str) -> str:
        return "".join(span.text for span in self.spans(rendered))

    def _hidden(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._hide_text(value)
        if isinstance(value, Mapping):
            return {self._hidden(key): self._hidden(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._hidden(item) for item in value]
        return value

    def _hide_text(self, text: str) -> str:
        return "".join(
            self._placeholder(span) if span.literal and span.text else span.text
            for span in self._control.split(text)
        )

    def _placeholder(self, span: Span) -> str:
        self._hidden_spans.append(span)
        return self._placeholders.of(len(self._hidden_spans) - 1)


def escape(spans: Iterable[Span]) -> bytes:
    """The text of `spans` as escaped bytes.

    One form for one list of spans: each literal is enclosed on its own, adjacent ones too, and an
    empty one leaves nothing. So equal prefixes of escaped bytes are equal prefixes of spans.
    """
    return b"".join(
        before + span.text.encode() + after
        for span in spans
        if span.text
        for before, after in (_enclosure(span),)
    )


def _enclosure(span: Span) -> tuple[bytes, bytes]:
    if span.picture:
        return PICTURE, PICTURE_END
    return (OPEN, CLOSE) if span.literal else (b"", b"")


def escape_prefix(spans: Iterable[Span], size_bytes: int) -> bytes:
    """The escaped form of the first bytes of the text; a truncated literal is left open, a
    truncated picture out."""
    parts: list[bytes] = []
    for span in spans:
        whole = span.text.encode()
        kept = whole[:size_bytes]
        size_bytes -= len(kept)
        if span.picture and kept != whole:
            break
        before, after = _enclosure(span)
        parts += [before, kept, after if kept == whole else b""] if kept else []
    return b"".join(parts)


def spans_from(escaped: bytes, at: int) -> list[Span]:
    """The spans of escaped bytes from `at` on; UnicodeDecodeError in the middle of a character."""
    literal, picture = _is_open(escaped, at), False
    spans: list[Span] = []
    for piece in DELIMITER.split(escaped[at:]):
        if piece in (OPEN, CLOSE, PICTURE, PICTURE_END):
            literal, picture = piece == OPEN, piece == PICTURE
        elif piece:
            spans.append(Span(piece.decode(), literal, picture))
    return spans


def unescape(escaped: bytes) -> bytes:
    """The text alone, in UTF-8."""
    return escaped.translate(None, OPEN + CLOSE + PICTURE + PICTURE_END)


def _is_open(escaped: bytes, at: int) -> bool:
    """Whether `at` is inside a literal."""
    return escaped.rfind(OPEN, 0, at) > escaped.rfind(CLOSE, 0, at)


def _any_of(texts: list[str]) -> str:
    """A pattern for the longest of the sorted `texts`; of thousands, few are tried anywhere."""
    if not texts:
        return r"(?!)"
    if len(texts) == 1:
        return re.escape(texts[0])
    shared = common_length(texts[0], texts[-1])  # sorted: these two differ the earliest
    rests = [text[shared:] for text in texts]
    branches = [_any_of(list(group)) for _, group in groupby(filter(None, rests), itemgetter(0))]
    optional = "?" if "" in rests else ""
    return f"{re.escape(texts[0][:shared])}(?:{'|'.join(branches)}){optional}"
