"""Llama's JSON calls: `{"name": …, "parameters": {…}}`, which no marker tells from an answer."""

from __future__ import annotations

import re
from collections.abc import Collection

from rekindle.chat.tools.json_calls import ARGUMENTS, NAMES, JsonCalls
from rekindle.chat.tools.reader import Finder, Steps

TAG, START, END = "<|python_tag|>", "<|python_start|>", "<|python_end|>"
MARKERS = (TAG, START, END)

_BETWEEN = re.compile(r"[\s;]*")


class Llama(JsonCalls):
    """Calls of known tools, at the beginning of the reply or after a marker."""

    opens = Finder(TAG, START)
    closes = (END,)
    stops = Finder(*MARKERS)
    keys = (*NAMES, *ARGUMENTS, "type", "id")  # an answer in JSON is told by its first key

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._names = names

    def _accepts(self, name: str) -> bool:
        return name in self._names

    def _run(self) -> Steps[None]:
        yield from self._block("")
        yield from super()._run()

    def _block(self, marker: str) -> Steps[None]:
        self._source.hold(marker)
        yield from self._source.space()
        while (yield from self._object()):
            self._source.hold()
            yield from self._source.run(_BETWEEN)
        yield from self._unsay()
