"""Converts literals in Python's and Gemma's notations to JSON while they arrive."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from rekindle.chat.messages import dump_json, refuse_constant, without_surrogates
from rekindle.chat.tools.stream import MarkerFinder, Reading, StreamReader

NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
MAX_DEPTH = 200  # deeper nesting is not read as a literal

_WORDS = {"True": "true", "False": "false", "None": "null"}
_WORDS |= {word: word for word in ("true", "false", "null")}
_CLOSERS = {"{": "}", "[": "]", "(": ")"}
_JSON = {"(": "[", ")": "]"}  # a tuple becomes an array
_ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{1,3})|(.))", re.DOTALL
)
_ESCAPED = {
    **dict(zip("abfnrtv", "\a\b\f\n\r\t\v", strict=True)),
    **{character: character for character in "\\'\"/"},
    "\n": "",
}


class LiteralSyntax(NamedTuple):
    """How a notation writes strings and bare words."""

    quotes: Mapping[str, MarkerFinder]  # each opening quote, and the finder of its end
    word: re.Pattern[str]
    key: re.Pattern[str]
    loose: bool  # a bare word that is not a number or constant is a string


PYTHON = LiteralSyntax(
    quotes={quote: MarkerFinder(quote, escapes=True) for quote in ('"""', "'''", '"', "'")},
    word=re.compile(r"[\w.+-]*"),
    key=re.compile(r"[\w.+-]*"),
    loose=False,
)


def loose_syntax(quote: str) -> LiteralSyntax:
    """A notation with bare keys, and with a special token around strings."""
    return LiteralSyntax(
        quotes={quote: MarkerFinder(quote), '"': MarkerFinder('"', escapes=True)},
        word=re.compile(r"[^,{}\[\]<]*"),
        key=re.compile(r"[^:,{}\[\]<]*"),
        loose=True,
    )


def is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return False
    return True


def read_literal(reader: StreamReader, syntax: LiteralSyntax) -> Reading[str | None]:
    """The JSON of the next literal, or None if there is no valid one."""
    out: list[str] = []
    closers: list[str] = []
    while len(closers) <= MAX_DEPTH:
        yield from reader.space()
        first = yield from reader.peek()
        if first in _CLOSERS:
            reader.skip(1)
            closers.append(_CLOSERS[first])
            out.append(_JSON.get(first, first))
            continue
        if closers and first in (",", ":"):
            reader.skip(1)
            out.append(first)
            continue
        if closers and first == closers[-1]:
            reader.skip(1)
            if out[-1] == ",":  # Python allows one after the last item
                out.pop()
            closer = closers.pop()
            out.append(_JSON.get(closer, closer))
        else:
            at_key = bool(closers) and closers[-1] == "}" and out[-1] in ("{", ",")
            token = yield from _atom(reader, syntax, at_key=at_key)
            if token is None:
                return None
            out.append(token)
        if not closers:
            text = "".join(out)
            return text if len(out) == 1 or is_json(text) else None
    return None


def _atom(reader: StreamReader, syntax: LiteralSyntax, *, at_key: bool) -> Reading[str | None]:
    string = yield from read_string(reader, syntax)
    if string is not None:
        return dump_json(string)
    if (yield from reader.peek()) == "":
        return None
    word = (yield from reader.run(syntax.key if at_key else syntax.word)).strip()
    # A word at the end of the text may have been cut.
    if not word or (yield from reader.peek()) == "":
        return None
    value = None if at_key else _constant(word)
    return dump_json(word) if value is None and (at_key or syntax.loose) else value


def read_string(reader: StreamReader, syntax: LiteralSyntax) -> Reading[str | None]:
    """The next string, or None if there is none or its end is missing."""
    quote = yield from reader.starts(*syntax.quotes)
    if quote is None:
        return None
    finder = syntax.quotes[quote]
    body, end = yield from reader.all_until(finder)
    if end is None:
        return None
    reader.skip(len(end))
    return without_surrogates(_ESCAPE.sub(_unescape, body)) if finder.escapes else body


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
    with suppress(ValueError):
        return str(int(word, 0))  # such as 0x1F or 1_000
    with suppress(ValueError):
        return json.dumps(float(word), allow_nan=False)
    return None
