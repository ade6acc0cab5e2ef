"""Calls as a Python list, `[f(a=1), g()]`: Llama 3.2 and 4, LFM2, and models trained like them."""

from __future__ import annotations

from collections.abc import Collection

from rekindle.chat.tools.base import Machine
from rekindle.chat.tools.python_calls import signatures
from rekindle.chat.tools.reader import Finder, Steps

OPENS = ("<|python_start|>", "<|tool_call_start|>")
CLOSES = ("<|python_end|>", "<|tool_call_end|>")
MARKERS = OPENS + CLOSES


class Pythonic(Machine):
    """Lists of calls of known tools, at the beginning of the reply or after a marker.

    A list is handed out whole: its last name may still make it a text.
    """

    opens = Finder(*OPENS)
    closes = CLOSES

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._names = names

    def _run(self) -> Steps[None]:
        yield from self._block("")
        yield from super()._run()

    def _block(self, marker: str) -> Steps[None]:
        source = self._source
        source.hold(marker)
        yield from source.space()
        while calls := (yield from signatures(source, self._names)):
            for name, arguments in calls:
                yield self._begin(name)
                yield self._argue(arguments)
                self._end()
            source.hold()
            yield from source.space()
        yield from self._unsay()
