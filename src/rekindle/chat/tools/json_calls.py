"""Parses calls that are JSON objects: a name, and arguments that are passed on as sampled."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from rekindle.chat.messages import without_surrogates
from rekindle.chat.tools.stream import MarkerFinder, Reading, Steps, StreamParser, StreamReader
from rekindle.protocol.events import Part

NAMES = ("name", "function")
ARGUMENTS = ("arguments", "parameters")


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
    """Follows one JSON value to its end, or to a marker that cannot be part of it.

    It looks only at strings and depth, so text that is not JSON passes unchanged. A marker inside a
    string is text, unless the string has a bare line feed, which JSON does not allow.
    """

    def __init__(self, stops: MarkerFinder) -> None:
        self.done = False
        self.whole = False  # the value ended by itself, not at a marker
        self._stops = stops
        self._patterns = _patterns(stops.pattern)
        self._pattern: re.Pattern[str] | None = None
        self._depth = 0

    def piece(self, reader: StreamReader) -> Reading[str]:
        """Return the next piece of the value, or an empty text at its end."""
        while not self.done:
            end = self._end(reader.text, reader.at, reader.ended)
            if end > reader.at:
                return reader.take(end)
            if reader.ended:
                break
            if not self.done:
                yield
        return ""

    def _end(self, text: str, at: int, ended: bool) -> int:
        """The position up to which the text certainly belongs to the value."""
        limit = len(text) if ended else self._stops.certain(text, at)
        if self._pattern is None and at < limit:
            self._pattern = self._patterns.outside if text[at] in '"{[' else self._patterns.scalar
        while not self.done and self._pattern is not None:
            match = self._pattern.search(text, at)
            if match is None or match.start() >= limit:
                return self._reach(text, at, limit, ended)
            at = self._step(match)
        return at

    def _reach(self, text: str, at: int, limit: int, ended: bool) -> int:
        quoted = self._pattern in (self._patterns.inside, self._patterns.torn)
        if quoted and not ended and at < len(text) and text.endswith("\\"):
            limit = min(limit, len(text) - 1)  # the escaped character has not arrived
        return max(at, limit)

    def _step(self, match: re.Match[str]) -> int:
        """Handles a structural character. Returns where to continue."""
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
    """The text of a JSON string, or None for other text."""
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        return None
    return without_surrogates(value) if isinstance(value, str) else None


@dataclass(slots=True)
class _Draft:
    name: str | None = None
    held: list[Part] | None = None  # parts of arguments that came before the name
    begun: bool = False
    ended: bool = True  # the arguments were not cut off by the end of the text
    depth: int = 1  # number of open objects: 2 if the call is wrapped in {"function": …}


class JsonCallParser(StreamParser):
    stops = MarkerFinder()  # markers that end a call, even inside broken JSON
    keys: Collection[str] = ()  # the only keys that a call may have, if any are given

    def _accepts(self, name: str) -> bool:
        return bool(name)

    def _objects(self) -> Steps[bool]:
        """Reads a call object or a list of them. Returns whether there was a call."""
        reader = self._reader
        if not (yield from reader.starts("[")):
            return (yield from self._object())
        called = False
        while True:
            if called:
                reader.hold()
            yield from reader.space()
            if not (yield from self._object()):
                break
            called = True
            yield from reader.space()
            yield from reader.starts(",")
        if called:
            rest = reader.release().lstrip()
            closed = not rest and (yield from reader.starts("]"))
            yield from [] if closed else self._possible_call(rest)
        return called

    def _object(self) -> Steps[bool]:
        """Reads one call object. Returns whether it was a call."""
        if not (yield from self._reader.starts("{")):
            return False
        draft = _Draft()
        ended = yield from self._members(draft)
        if not draft.begun:
            if draft.name is None or not ended:
                return False
            yield self._start_call(draft.name)
            yield self._arguments("{}")
        if draft.ended:
            self._end_call()
        return True

    def _members(self, draft: _Draft) -> Steps[bool]:
        """Reads the members of a call. Returns whether it ends with its brace or at a marker."""
        while draft.depth:
            yield from self._reader.space()
            match (yield from self._reader.peek()):
                case "}":
                    self._reader.skip(1)
                    draft.depth -= 1
                case ",":
                    self._reader.skip(1)
                case '"':
                    if not (yield from self._member(draft)):
                        return False
                case _:
                    return (yield from self._reader.at_marker(self.stops))
        return True

    def _member(self, draft: _Draft) -> Steps[bool]:
        """Reads a key and its value. Returns whether the object may still be a call."""
        reader = self._reader
        key = yield from self._string()
        yield from reader.space()
        if key is None or (self.keys and key not in self.keys):
            return False
        if not (yield from reader.starts(":")):
            return False
        yield from reader.space()
        first = yield from reader.peek()
        if key in NAMES and first == '"' and draft.name is None:
            return (yield from self._name(draft))
        if key == "function" and first == "{":
            reader.skip(1)
            draft.depth += 1
            return True
        if key in ARGUMENTS and first and not draft.begun and draft.held is None:
            yield from self._arguments_of(draft)
            return True
        yield from self._raw()
        return bool(first)

    def _name(self, draft: _Draft) -> Steps[bool]:
        name = yield from self._string()
        if name is None or not self._accepts(name):
            return False
        draft.name = name
        if draft.held is not None:
            yield self._start_call(name)
            yield from draft.held
            draft.begun = True
        return True

    def _arguments_of(self, draft: _Draft) -> Steps[None]:
        if draft.name is not None:
            draft.begun = True
            yield self._start_call(draft.name)
            draft.ended = yield from self._read_arguments()
            return
        draft.held = []
        self._calls += 1  # the number of the call to which the arguments will belong
        arguments = self._read_arguments()
        try:
            while True:
                part = next(arguments)
                if part is None:
                    yield None
                else:
                    draft.held.append(part)
        except StopIteration as stop:
            draft.ended = stop.value
        self._calls -= 1

    def _read_arguments(self) -> Steps[bool]:
        """Passes arguments on as they arrive. Returns whether they end before the text does."""
        first = yield from self._reader.peek()
        if first in ("{", "["):
            value = JsonScan(self.stops)
            while piece := (yield from value.piece(self._reader)):
                yield self._arguments(piece)
            return value.done
        text, value = yield from self._raw()
        if first == '"':
            string = unquoted(text)
            text = text if string is None else string
        yield self._arguments("{}" if text.strip() in ("", "null") else text)
        return value.done

    def _string(self) -> Reading[str | None]:
        text, value = yield from self._raw()
        return unquoted(text) if value.whole else None

    def _raw(self) -> Reading[tuple[str, JsonScan]]:
        """The text of one value, and the scan that found its end."""
        value = JsonScan(self.stops)
        pieces = []
        while piece := (yield from value.piece(self._reader)):
            pieces.append(piece)
        return "".join(pieces), value
