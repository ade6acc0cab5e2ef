"""`[TOOL_CALLS][{"name": …, "arguments": {…}}]` and the newer `[TOOL_CALLS]name[ARGS]{…}`."""

from __future__ import annotations

import re

from rekindle.chat.tools.json_calls import JsonCalls
from rekindle.chat.tools.reader import Finder, Reading, Steps

OPEN, ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
MARKERS = (OPEN, ID, ARGS)

_NAME = re.compile(r"[\w.:/-]*")
_ID = re.compile(r"\w*")


class Mistral(JsonCalls):
    """A marker before each call, or before a list of them; nothing marks their end."""

    opens = Finder(OPEN)
    stops = Finder(OPEN)

    def _block(self, marker: str) -> Steps[None]:
        source = self._source
        source.hold(marker)
        yield from source.space()
        if (yield from source.peek()) in ("[", "{"):
            if not (yield from self._objects()):
                yield from self._unsay()
            return
        name = yield from source.run(_NAME)
        if name and (yield from self._has_arguments()):
            yield self._begin(name)
            yield from self._named_arguments()
        else:
            yield from self._unsay()

    def _has_arguments(self) -> Reading[bool]:
        """Whether arguments follow a name: behind their marker, or at once."""
        source = self._source
        yield from source.space()
        if (yield from source.starts(ID)):
            yield from source.run(_ID)
        if (yield from source.starts(ARGS)):
            return True
        return (yield from source.peek()) == "{"

    def _named_arguments(self) -> Steps[None]:
        yield from self._source.space()
        if (yield from self._source.peek()) != "{":
            yield from self._argue_raw(self.stops)
        elif (yield from self._arguments()):
            self._end()
