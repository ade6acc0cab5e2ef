"""`<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen 2.5 and 3, and many more.

Phi-4 mini, Granite 3 and Nemotron Nano 2 write the same between other markers; SmolLM2 and those
three write a list of calls between one pair.
"""

from __future__ import annotations

import re

from rekindle.chat.tools.json_calls import JsonCalls
from rekindle.chat.tools.reader import Finder, Steps

OPENS = ("<tool_call>", "<|tool_call|>", "<TOOLCALL>")
CLOSES = ("</tool_call>", "<|/tool_call|>", "</TOOLCALL>")
MARKERS = OPENS + CLOSES

_SURPLUS = re.compile(r"[\s}\]]*")


class Hermes(JsonCalls):
    """Calls between tags."""

    opens = Finder(*OPENS)
    closes = CLOSES
    stops = Finder(*MARKERS)

    def _block(self, marker: str) -> Steps[None]:
        source = self._source
        source.hold(marker)
        yield from source.space()
        if not (yield from self._objects()):
            yield from self._unsay()
            return
        source.hold()
        yield from source.run(_SURPLUS)  # one brace too many is a common slip
        if (yield from source.starts(*CLOSES)) or not (yield from source.peek()):
            source.drop()
        else:
            yield from self._unsay()
