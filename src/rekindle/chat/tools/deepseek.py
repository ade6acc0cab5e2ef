"""DeepSeek's calls: V3 and R1 fence their JSON and name a type first, V3.1 does neither."""

from __future__ import annotations

import re

from rekindle.chat.tools.json_calls import JsonCalls
from rekindle.chat.tools.reader import Finder, Reading, Steps

_BAR = "\uff5c"  # a vertical line of full width


def _marker(text: str) -> str:
    return f"<{_BAR}{text}{_BAR}>"


# The small distilled models are not sure of the first marker's spelling.
ALL_BEGIN = tuple(map(_marker, ("tool▁calls▁begin", "tool_calls_begin", "tool calls begin")))
BEGIN, SEPARATOR = _marker("tool▁call▁begin"), _marker("tool▁sep")
END, ALL_END = _marker("tool▁call▁end"), _marker("tool▁calls▁end")
MARKERS = (*ALL_BEGIN, BEGIN, SEPARATOR, END, ALL_END)

_TYPE = "function"
_NAME = re.compile(r"[\w.:/-]*")
_FENCES = ("```json", "```")
_ENDS = Finder(BEGIN, END, ALL_END, "```")


class DeepSeek(JsonCalls):
    """Calls between markers of their own, all of them between another pair."""

    opens = Finder(*ALL_BEGIN, BEGIN)
    closes = (END, ALL_END)
    stops = Finder(BEGIN, END, ALL_END)

    def _block(self, marker: str) -> Steps[None]:
        source = self._source
        source.hold(marker)
        if marker != BEGIN:
            yield from source.space()
        begun = marker == BEGIN or (yield from source.starts(BEGIN))
        name = (yield from self._called()) if begun else None
        if not name:
            yield from self._unsay()
            return
        yield self._begin(name)
        yield from self._fenced()

    def _called(self) -> Reading[str | None]:
        """The name of a call whose arguments, or end, come next; None when this is no call."""
        source = self._source
        yield from source.space()
        name = yield from source.run(_NAME)
        if not (yield from source.starts(SEPARATOR)):
            return None
        yield from source.space()
        if name == _TYPE and (yield from source.peek()) != "{":
            name = yield from source.run(_NAME)
            yield from source.space()
            yield from source.starts(*_FENCES)
            yield from source.space()
        return name if (yield from source.peek()) else None

    def _fenced(self) -> Steps[None]:
        source = self._source
        if (yield from source.peek()) != "{":
            yield from self._argue_raw(_ENDS)
        elif (yield from self._arguments()):
            self._end()
        yield from source.space()
        yield from source.starts("```")
