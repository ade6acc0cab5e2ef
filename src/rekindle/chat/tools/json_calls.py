"""Calls written as JSON objects: a name, and arguments passed on as they were sampled."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from rekindle.chat.tools.base import StreamParser
from rekindle.chat.tools.reader import MarkerFinder, Reading, Steps
from rekindle.chat.tools.values import JsonScan, unquoted
from rekindle.protocol.events import Part

NAMES = ("name", "function")
ARGUMENTS = ("arguments", "parameters")


@dataclass(slots=True)
class _Draft:
    """What is known of a call so far."""

    name: str | None = None
    held: list[Part] | None = None  # parts of arguments that came before the name
    begun: bool = False
    ended: bool = True  # the arguments were not cut off by the end of the text
    depth: int = 1  # of objects, when the call is wrapped in {"function": …}


class JsonCallParser(StreamParser):
    """Reads call objects, keys in any order."""

    stops = MarkerFinder()  # markers that end a call, even in the middle of broken JSON
    keys: Collection[str] = ()  # keys that a call may have; empty for any

    def _accepts(self, name: str) -> bool:
        return bool(name)

    def _objects(self) -> Steps[bool]:
        """One call object, or a list of them; whether any was a call.

        When the first is none, what is held stays held.
        """
        if not (yield from self._reader.starts("[")):
            return (yield from self._object())
        called = False
        while True:
            if called:
                self._reader.hold()
            yield from self._reader.space()
            if not (yield from self._object()):
                break
            called = True
            yield from self._reader.space()
            yield from self._reader.starts(",")
        if called:
            rest = self._reader.release().lstrip()
            closed = not rest and (yield from self._reader.starts("]"))
            yield from [] if closed else self._possible_call(rest)
        return called

    def _object(self) -> Steps[bool]:
        """One call object; whether it was a call."""
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
        """The members of a call object; whether it ends with its brace or at a marker."""
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
        """One key and its value; whether this may still be a call."""
        key = yield from self._string()
        yield from self._reader.space()
        if key is None or (self.keys and key not in self.keys):
            return False
        if not (yield from self._reader.starts(":")):
            return False
        yield from self._reader.space()
        first = yield from self._reader.peek()
        if key in NAMES and first == '"' and draft.name is None:
            return (yield from self._name(draft))
        if key == "function" and first == "{":
            self._reader.skip(1)
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
        self._calls += 1  # the call that the arguments will belong to
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
        """The arguments' own text, as it arrives; whether it ends before the text does."""
        first = yield from self._reader.peek()
        if first in ("{", "["):
            value = JsonScan(self.stops)
            while piece := (yield from self._reader.scan(value)):
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
        """One value's text, and how it has ended."""
        value = JsonScan(self.stops)
        pieces = []
        while piece := (yield from self._reader.scan(value)):
            pieces.append(piece)
        return "".join(pieces), value
