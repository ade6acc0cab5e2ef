"""Separates text that a client wrote from control tokens that the template writes.

Escaped bytes are the UTF-8 text of a prompt with two kinds of marks. A literal is text that looks
like a control token, or could become one, but must stay text. It is enclosed in OPEN and CLOSE. The
text of a picture is enclosed in PICTURE and PICTURE_END. UTF-8 uses none of these four bytes.
"""

from __future__ import annotations

import re
import secrets
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from rekindle.errors import BadRequest
from rekindle.protocol.requests import depth_exceeds
from rekindle.tokens import any_of

OPEN, CLOSE = b"\xff", b"\xfe"
PICTURE, PICTURE_END = b"\xfd", b"\xfc"
DELIMITER = re.compile(b"([\xff\xfe\xfd\xfc])")
CHARACTER_BYTES = 4  # the longest UTF-8 encoding of a character

# Placeholders use private-use characters, which no template filter for case or whitespace changes.
PRIVATE = "".join(map(chr, range(0xF0000, 0xF0010)))
PLACEHOLDER_DIGITS = 8
_NUMBER = re.compile(f"[{PRIVATE}]{{{PLACEHOLDER_DIGITS}}}")
_TO_PRIVATE = str.maketrans("0123456789abcdef", PRIVATE)
_FROM_PRIVATE = str.maketrans(PRIVATE, "0123456789abcdef")


class TextSpan(NamedTuple):
    text: str
    literal: bool  # text of control tokens in it stays text
    picture: bool = False  # it represents a picture, whose tokens replace it


class ControlTexts:
    def __init__(self, texts: Iterable[str]) -> None:
        known = {text for text in texts if text}
        self._whole = re.compile(any_of(known))
        self._first = re.compile(any_of({text[0] for text in known}))
        self._beginnings = {text[:length] for text in known for length in range(1, len(text))}
        self._longest = max(map(len, known), default=0)

    def split(self, text: str) -> Iterator[TextSpan]:
        """The text in spans. Control texts, and a beginning of one at the end, are literal."""
        at = 0
        for match in self._whole.finditer(text):
            yield TextSpan(text[at : match.start()], literal=False)
            yield TextSpan(match[0], literal=True)
            at = match.end()
        rest = text[at:]
        tail = self._tail(rest)
        yield TextSpan(rest[: len(rest) - len(tail)], literal=False)
        yield TextSpan(tail, literal=True)

    def across(self, before: str, after: str) -> bool:
        """Whether the concatenation has a control text that spans the seam."""
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
        """The end of `text` that begins a control text, which the next string may complete."""
        window = text[-self._longest :]
        for match in self._first.finditer(window):
            if window[match.start() :] in self._beginnings:
                return window[match.start() :]
        return ""


class EndMarkers:
    """Finds where assistant messages end in escaped bytes: at an end token of the template."""

    def __init__(self, texts: Iterable[str]) -> None:
        ends = b"|".join(re.escape(text.encode()) for text in sorted(texts) if text) or rb"(?!)"
        self._pattern = re.compile(OPEN + b"[^" + CLOSE + b"]*" + CLOSE + b"|(" + ends + b")")

    def first_after(self, escaped: bytes, at: int) -> int | None:
        found = (match for match in self._pattern.finditer(escaped, at) if match[1])
        return next((match.start() for match in found), None)


class Placeholders:
    """Writes numbers as opaque text behind a random prefix that no user can guess."""

    def __init__(self) -> None:
        self._prefix = secrets.token_hex(8).translate(_TO_PRIVATE)

    def of(self, number: int) -> str:
        return self._prefix + f"{number:0{PLACEHOLDER_DIGITS}x}".translate(_TO_PRIVATE)

    def split(self, text: str) -> Iterator[str | int]:
        """The text and the numbers in it, in order. Drops truncated placeholders."""
        first, *rest = text.split(self._prefix)
        yield first
        for piece in rest:
            if number := _NUMBER.match(piece):
                yield int(number[0].translate(_FROM_PRIVATE), 16)
                piece = piece[PLACEHOLDER_DIGITS:]
            yield piece


class Escaper:
    """Hides the literals of one conversation from its template, and puts them back as text."""

    def __init__(self, control: ControlTexts) -> None:
        self._control = control
        self._placeholders = Placeholders()
        self._hidden_spans: list[TextSpan] = []

    def place_picture(self, text: str) -> str:
        return self._placeholder(TextSpan(text, literal=False, picture=True))

    def hide(self, value: Any, depth_limit: int = 100) -> Any:
        """A copy of a JSON value with a placeholder for each literal in its strings."""
        if depth_exceeds(value, depth_limit + 1):  # a value without nesting has depth 1
            raise BadRequest(f"The messages are nested more than {depth_limit} deep.")
        return self._hidden(value)

    def hide_each(self, values: Sequence[Any], plain: Set[int]) -> tuple[list[Any], frozenset[int]]:
        """Hides literals and returns the indices without any. Those in `plain` are not searched."""
        hidden, found = list(values), set(plain)
        for index in sorted(set(range(len(hidden))) - found):
            before = len(self._hidden_spans)
            hidden[index] = self.hide([hidden[index]])[0]
            if len(self._hidden_spans) == before:
                found.add(index)
        return hidden, frozenset(found)

    def spans(self, rendered: str) -> list[TextSpan]:
        """The rendered text with its literals restored. A text without literals is one span."""
        return [
            self._hidden_spans[piece] if isinstance(piece, int) else TextSpan(piece, literal=False)
            for piece in self._placeholders.split(rendered)
            if piece != ""
        ]

    def restore(self, rendered: str) -> str:
        return "".join(span.text for span in self.spans(rendered))

    def _hidden(self, value: Any) -> Any:
        if isinstance(value, str):
            return "".join(
                self._placeholder(span) if span.literal and span.text else span.text
                for span in self._control.split(value)
            )
        if isinstance(value, Mapping):
            return {self._hidden(key): self._hidden(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._hidden(item) for item in value]
        return value

    def _placeholder(self, span: TextSpan) -> str:
        self._hidden_spans.append(span)
        return self._placeholders.of(len(self._hidden_spans) - 1)


def escape(spans: Iterable[TextSpan]) -> bytes:
    """The text of `spans` as escaped bytes.

    Adjacent literals are enclosed one by one, and an empty span adds nothing. Equal prefixes of
    escaped bytes are therefore equal prefixes of spans.
    """
    return escape_prefix(spans, sys.maxsize)


def escape_prefix(spans: Iterable[TextSpan], size_bytes: int) -> bytes:
    """The first bytes of the text, escaped. Drops a truncated picture, leaves a literal open."""
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


def _enclosure(span: TextSpan) -> tuple[bytes, bytes]:
    if span.picture:
        return PICTURE, PICTURE_END
    return (OPEN, CLOSE) if span.literal else (b"", b"")


def spans_from(escaped: bytes, at: int) -> list[TextSpan]:
    """The spans of escaped bytes from `at` on. Raises UnicodeDecodeError inside a character."""
    literal, picture = _is_open(escaped, at), False
    spans: list[TextSpan] = []
    for piece in DELIMITER.split(escaped[at:]):
        if piece in (OPEN, CLOSE, PICTURE, PICTURE_END):
            literal, picture = piece == OPEN, piece == PICTURE
        elif piece:
            spans.append(TextSpan(piece.decode(), literal, picture))
    return spans


def unescape(escaped: bytes) -> bytes:
    return escaped.translate(None, OPEN + CLOSE + PICTURE + PICTURE_END)


def _is_open(escaped: bytes, at: int) -> bool:
    return escaped.rfind(OPEN, 0, at) > escaped.rfind(CLOSE, 0, at)
