"""Where a JSON value ends, found while its text arrives."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import NamedTuple

from rekindle.chat.tools.reader import MarkerFinder, Reading, StreamReader

NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")


class _Patterns(NamedTuple):
    outside: re.Pattern[str]
    inside: re.Pattern[str]
    torn: re.Pattern[str]
    scalar: re.Pattern[str]


@lru_cache(maxsize=64)
def _patterns(stops: str) -> _Patterns:
    return _Patterns(
        outside=re.compile(rf'({stops})|\{{+|\[|[\]}}]|"'),
        inside=re.compile(r'()(?!)|"|\\.|\n', re.DOTALL),
        torn=re.compile(rf'({stops})|"|\\.', re.DOTALL),
        scalar=re.compile(rf"({stops})|[\s,\]}}]"),
    )


class JsonScan:
    """Follows one JSON value to its end, or to a marker that can be no part of it.

    It looks at strings and depth alone, so text that is not JSON passes unchanged. A marker inside
    a string is text, unless the string holds a bare line feed, which JSON does not allow.
    """

    def __init__(self, stops: MarkerFinder) -> None:
        self.done = False
        self.whole = False  # it ended by itself, not at a marker
        self._stops = stops
        self._patterns = _patterns(stops.pattern)
        self._pattern: re.Pattern[str] | None = None
        self._depth = 0

    def read(self, text: str, at: int, *, ended: bool) -> int:
        """How far the value certainly reaches."""
        limit = len(text) if ended else self._stops.certain(text, at)
        if self._pattern is None and at < limit:
            at = self._start(text, at)
        while not self.done and self._pattern is not None:
            match = self._pattern.search(text, at)
            if match is None or match.start() >= limit:
                return self._reach(text, at, limit, ended)
            at = self._step(match)
        return at

    def _start(self, text: str, at: int) -> int:
        match text[at]:
            case '"':
                self._pattern = self._patterns.inside
                return at + 1
            case "{" | "[":
                self._pattern = self._patterns.outside
            case _:
                self._pattern = self._patterns.scalar
        return at

    def _reach(self, text: str, at: int, limit: int, ended: bool) -> int:
        quoted = self._pattern in (self._patterns.inside, self._patterns.torn)
        if quoted and not ended and at < len(text) and text.endswith("\\"):
            limit = min(limit, len(text) - 1)  # the escaped character has not arrived
        return max(at, limit)

    def _step(self, match: re.Match[str]) -> int:
        """Handle a structural character; where to continue."""
        if match[1] or self._pattern is self._patterns.scalar:
            self.done, self.whole = True, not match[1]
            return match.start()
        match match[0][0]:
            case '"' if self._pattern is self._patterns.outside:
                self._pattern = self._patterns.inside
            case '"':
                self._pattern = self._patterns.outside
                self.done = self.whole = not self._depth
            case "\n":
                self._pattern = self._patterns.torn
            case "{" | "[":
                self._depth += len(match[0])
            case "}" | "]":
                self._depth -= 1
                self.done = self.whole = not self._depth
        return match.end()


def unquoted(text: str) -> str | None:
    """The text of a JSON string; None when it is none."""
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        return None
    return clean(value) if isinstance(value, str) else None


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def clean(text: str) -> str:
    """The text with surrogate pairs joined and lone surrogates replaced: UTF-8 has neither."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


# ----------------------------------------------------------------------
# Literals in other notations than JSON, converted to JSON while they arrive.

DEPTH_LIMIT = 200  # levels of nesting; anything deeper is not read as a literal

_WORDS = {"True": "true", "False": "false", "None": "null"}
_WORDS |= {word: word for word in ("true", "false", "null")}
_CLOSERS = {"{": "}", "[": "]", "(": ")"}
_JSON = {"(": "[", ")": "]"}  # a tuple is an array
_ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{1,3})|(.))", re.DOTALL
)
_ESCAPED = {
    **dict(zip("abfnrtv", "\a\b\f\n\r\t\v", strict=True)),
    **{character: character for character in "\\'\"/"},
    "\n": "",
}


class Dialect(NamedTuple):
    """How a notation writes strings and bare words."""

    quotes: Mapping[str, MarkerFinder]  # each quote, and what finds its end
    escaped: Collection[str]  # quotes between which a backslash escapes
    word: re.Pattern[str]
    key: re.Pattern[str]
    loose: bool  # a bare word that is no number or constant is a string


PYTHON = Dialect(
    quotes={quote: MarkerFinder(quote, escapes=True) for quote in ('"""', "'''", '"', "'")},
    escaped=('"""', "'''", '"', "'"),
    word=re.compile(r"[\w.+-]*"),
    key=re.compile(r"[\w.+-]*"),
    loose=False,
)


def loose(quote: str) -> Dialect:
    """Bare keys, and strings between a special quote token."""
    return Dialect(
        quotes={quote: MarkerFinder(quote), '"': MarkerFinder('"', escapes=True)},
        escaped=('"',),
        word=re.compile(r"[^,{}\[\]<]*"),
        key=re.compile(r"[^:,{}\[\]<]*"),
        loose=True,
    )


def read_literal(reader: StreamReader, dialect: Dialect) -> Reading[str | None]:
    """The JSON of the next literal; None when there is none that can be read."""
    out: list[str] = []
    closers: list[str] = []
    while len(closers) <= DEPTH_LIMIT:
        yield from reader.space()
        first = yield from reader.peek()
        if first in _CLOSERS and first:
            reader.skip(1)
            closers.append(_CLOSERS[first])
            out.append(_JSON.get(first, first))
            continue
        if closers and first in (",", ":") and first:
            reader.skip(1)
            out.append(first)
            continue
        if closers and first == closers[-1]:
            reader.skip(1)
            _close(out, closers)
        else:
            at_key = bool(closers) and closers[-1] == "}" and out[-1] in ("{", ",")
            token = yield from _atom(reader, dialect, at_key=at_key)
            if token is None:
                return None
            out.append(token)
        if not closers:
            text = "".join(out)
            return text if len(out) == 1 or is_json(text) else None
    return None


def _close(out: list[str], closers: list[str]) -> None:
    if out[-1] == ",":  # Python allows one after the last item
        out.pop()
    closer = closers.pop()
    out.append(_JSON.get(closer, closer))


def _atom(reader: StreamReader, dialect: Dialect, *, at_key: bool) -> Reading[str | None]:
    """A string, number or constant, or a key, which JSON always quotes."""
    string = yield from read_string(reader, dialect)
    if string is not None:
        return quoted(string)
    if (yield from reader.peek()) == "":
        return None
    word = (yield from reader.run(dialect.key if at_key else dialect.word)).strip()
    # At the end of the text a word may have been cut short.
    if not word or (yield from reader.peek()) == "":
        return None
    if at_key:
        return quoted(word)
    value = _constant(word)
    return quoted(word) if value is None and dialect.loose else value


def read_string(reader: StreamReader, dialect: Dialect) -> Reading[str | None]:
    """The next string; None when there is none, or when its end is missing."""
    quote = yield from reader.starts(*dialect.quotes)
    if quote is None:
        return None
    body, end = yield from reader.through(dialect.quotes[quote])
    if end is None:
        return None
    return clean(_ESCAPE.sub(_unescape, body)) if quote in dialect.escaped else body


def _unescape(match: re.Match[str]) -> str:
    code = match[1] or match[2] or match[3]
    if code or match[4]:
        number = int(code, 16) if code else int(match[4], 8)
        return chr(number) if number <= 0x10FFFF else match[0]
    return _ESCAPED.get(match[5], match[0])


def _constant(word: str) -> str | None:
    if word in _WORDS:
        return _WORDS[word]
    if NUMBER.fullmatch(word):
        return word
    for read in (_whole, _fraction):
        try:
            return read(word)
        except ValueError:
            continue
    return None


def _whole(word: str) -> str:
    return str(int(word, 0))


def _fraction(word: str) -> str:
    return json.dumps(float(word), allow_nan=False)
