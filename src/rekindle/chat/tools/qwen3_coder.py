"""Qwen3-Coder's calls: `<function=name><parameter=key>value</parameter></function>`.

Values are bare text; the tool's schema says what they are. Seed-OSS writes the same inside a tag of
its own.
"""

from __future__ import annotations

import re

from rekindle.chat.tools.base import Machine
from rekindle.chat.tools.json_value import quoted
from rekindle.chat.tools.parameters import Tools, properties, typed
from rekindle.chat.tools.reader import Finder, Reading, Steps

TAGS = ("<tool_call>", "<seed:tool_call>")
FUNCTION, PARAMETER = "<function=", "<parameter="
VALUE_END, FUNCTION_END = "</parameter>", "</function>"
CLOSES = (FUNCTION_END, "</tool_call>", "</seed:tool_call>")
MARKERS = (*TAGS, *CLOSES[1:])

_NAME = re.compile(r"[^<>\n]*")
# A value whose own end is missing ends where the next one, or the function's end, has its line.
_VALUE_ENDS = Finder(VALUE_END, "\n" + PARAMETER, "\n" + FUNCTION_END)


class Coder(Machine):
    """Calls whose arguments come one whole value at a time."""

    opens = Finder(*TAGS, FUNCTION)
    closes = CLOSES

    def __init__(self, tools: Tools) -> None:
        super().__init__()
        self._properties = properties(tools)

    def _block(self, marker: str) -> Steps[None]:
        source = self._source
        source.hold(marker)
        if marker != FUNCTION:
            yield from source.space()
        begun = marker == FUNCTION or (yield from source.starts(FUNCTION))
        name = (yield from self._tag_rest()) if begun else None
        following = (yield from self._next_tag()) if name else None
        if name is None or following is None:
            yield from self._unsay()
            return
        yield self._begin(name)
        yield from self._parameters(name, following)

    def _tag_rest(self) -> Reading[str | None]:
        """The name in a tag, up to its end; None when there is none."""
        name = yield from self._source.run(_NAME)
        return name.strip() or None if (yield from self._source.starts(">")) else None

    def _next_tag(self) -> Reading[str | None]:
        yield from self._source.space()
        return (yield from self._source.starts(PARAMETER, *CLOSES))

    def _parameters(self, name: str, following: str | None) -> Steps[None]:
        before = "{"
        schemas = self._properties.get(name, {})
        while following == PARAMETER:
            self._source.hold(PARAMETER)
            key = yield from self._tag_rest()
            if key is None:
                break
            text, end = yield from self._value()
            if end is None:  # cut off: so are the arguments, for all to see
                yield self._argue(f"{before}{quoted(key)}: {quoted(text)[:-1]}")
                return
            yield self._argue(f"{before}{quoted(key)}: {typed(text, schemas.get(key))}")
            before = ", "
            self._source.drop()
            following = yield from self._next_tag()
        yield self._argue("{}" if before == "{" else "}")
        self._end()
        yield from self._unsay()

    def _value(self) -> Reading[tuple[str, str | None]]:
        """A value's text, without the line feeds that set it apart, and what ended it."""
        pieces = []
        while True:
            text, end = yield from self._source.until(_VALUE_ENDS)
            pieces.append(text)
            if end is not None or not text:
                break
        if end == VALUE_END:
            self._source.skip(len(end))
        text = "".join(pieces).removeprefix("\n")
        return text.removesuffix("\n") if end == VALUE_END else text, end
