"""Gemma 3's calls: Python in a block that is fenced as tool_code."""

from __future__ import annotations

import re
from collections.abc import Collection

from rekindle.chat.tools.base import Machine
from rekindle.chat.tools.python_calls import Signature, signature, signatures
from rekindle.chat.tools.reader import Finder, Reading, Steps

OPEN, CLOSE = "```tool_code", "```"

_BETWEEN = re.compile(r"[\s;]*")


class ToolCode(Machine):
    """Blocks that are nothing but calls of known tools; any other block is said."""

    opens = Finder(OPEN)

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._names = names

    def _block(self, marker: str) -> Steps[None]:
        self._source.hold(marker)
        calls = yield from self._statements()
        if not calls:
            yield from self._unsay()
            return
        for name, arguments in calls:
            yield self._begin(name)
            yield self._argue(arguments)
            self._end()

    def _statements(self) -> Reading[list[Signature]]:
        """All calls of a block up to its end; none when it is anything else."""
        source = self._source
        found: list[Signature] = []
        while True:
            yield from source.run(_BETWEEN)
            if (yield from source.starts(CLOSE)) or not (yield from source.peek()):
                return found
            calls = yield from self._statement()
            if not calls:
                return []
            found += calls

    def _statement(self) -> Reading[list[Signature] | None]:
        source = self._source
        if (yield from source.peek()) == "[":
            return (yield from signatures(source, self._names))
        printed = yield from source.starts("print(")  # the prompts that teach it often print
        call = yield from signature(source, self._names)
        if call is None or (printed and not (yield from source.starts(")"))):
            return None
        return [call]
