"""Gemma's calls, `call:name{key:value}`, with a token of its own around strings."""

from __future__ import annotations

import re
from typing import NamedTuple

from rekindle.chat.tools.base import Machine
from rekindle.chat.tools.json_value import quoted
from rekindle.chat.tools.literal import Dialect, literal, loose, text
from rekindle.chat.tools.reader import Finder, Reading, Steps

_CALL = "call:"
_NAME = re.compile(r"[\w.:/-]*")


class Spelling(NamedTuple):
    open: str
    close: str
    quote: str
    response: str  # after a call the model goes on to the tool's answer, which is not its to give

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(self)


FUNCTION_GEMMA = Spelling(
    "<start_function_call>", "<end_function_call>", "<escape>", "<start_function_response>"
)
GEMMA_4 = Spelling("<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>")


class Gemma(Machine):
    """Calls whose arguments come one whole pair at a time."""

    def __init__(self, spelling: Spelling) -> None:
        self.opens = Finder(spelling.open, spelling.response)
        self.closes = (spelling.close,)
        super().__init__()
        self._spelling = spelling
        self._dialect: Dialect = loose(spelling.quote)
        self._ends = Finder(spelling.close, spelling.open, spelling.response)

    def _block(self, marker: str) -> Steps[None]:
        source = self._source
        if marker == self._spelling.response:
            yield from self._response(marker)
            return
        source.hold(marker)
        while (name := (yield from self._called())) is not None:
            yield self._begin(name)
            yield from self._pairs()
            source.hold()
        yield from self._unsay()

    def _response(self, marker: str) -> Steps[None]:
        if not self._calls:
            yield from self._say(marker)
            return
        while (yield from self._source.peek()):
            self._source.rest()

    def _called(self) -> Reading[str | None]:
        """The name of a call whose arguments come next; None when this is no call."""
        source = self._source
        yield from source.space()
        if not (yield from source.starts(_CALL)):
            return None
        yield from source.space()
        name = yield from source.run(_NAME)
        yield from source.space()
        return name or None if (yield from source.starts("{")) else None

    def _pairs(self) -> Steps[None]:
        """The arguments, as JSON; from the first that cannot be read on, as they are."""
        source, before = self._source, "{"
        while True:
            source.hold()
            yield from source.space()
            if (yield from source.starts("}")):
                break
            yield from source.starts(",")
            pair = yield from self._pair()
            if pair is None:
                yield from self._broken(before.strip(", ") + source.release())
                return
            source.drop()
            yield self._argue(before + pair)
            before = ", "
        source.drop()
        yield self._argue("{}" if before == "{" else "}")
        self._end()

    def _pair(self) -> Reading[str | None]:
        source = self._source
        yield from source.space()
        key = yield from text(source, self._dialect)
        if key is None:
            key = (yield from source.run(self._dialect.key)).strip()
        yield from source.space()
        if not key or not (yield from source.starts(":")):
            return None
        value = yield from literal(source, self._dialect)
        return None if value is None else f"{quoted(key)}: {value}"

    def _broken(self, text: str) -> Steps[None]:
        """Arguments from what cannot be read on."""
        marker = None
        while True:
            if text:
                yield self._argue(text)
            if marker is not None:
                self._end()
                return
            text, marker = yield from self._source.until(self._ends)
            if marker is None and not text:
                return
