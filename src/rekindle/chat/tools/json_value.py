"""Where a JSON value ends, found while its text arrives."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import NamedTuple

from rekindle.chat.tools.reader import MarkerFinder

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
