"""Gemma 3's calls: Python in a block that is fenced as tool_code."""

from __future__ import annotations

import re
from collections.abc import Collection

from rekindle.chat.grammar.syntax import CallSyntax
from rekindle.chat.tools.base import StreamParser
from rekindle.chat.tools.format import TemplatePattern, ToolFormat, names
from rekindle.chat.tools.python_calls import Signature, python_call, signature, signatures
from rekindle.chat.tools.reader import MarkerFinder, Reading, Steps

OPEN, CLOSE = "```tool_code", "```"

_BETWEEN = re.compile(r"[\s;]*")


class Gemma3Parser(StreamParser):
    """Blocks that are nothing but calls of known tools; any other block is text."""

    opens = MarkerFinder(OPEN)

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._names = names

    def _block(self, marker: str) -> Steps[None]:
        self._reader.hold(marker)
        calls = yield from self._statements()
        if not calls:
            yield from self._release_as_text()
            return
        for name, arguments in calls:
            yield self._start_call(name)
            yield self._arguments(arguments)
            self._end_call()

    def _statements(self) -> Reading[list[Signature]]:
        """All calls of a block up to its end; none when it is anything else."""
        reader = self._reader
        found: list[Signature] = []
        while True:
            yield from reader.run(_BETWEEN)
            if (yield from reader.starts(CLOSE)) or not (yield from reader.peek()):
                return found
            calls = yield from self._statement()
            if not calls:
                return []
            found += calls

    def _statement(self) -> Reading[list[Signature] | None]:
        reader = self._reader
        if (yield from reader.peek()) == "[":
            return (yield from signatures(reader, self._names))
        printed = yield from reader.starts("print(")  # the prompts that teach it often print
        call = yield from signature(reader, self._names)
        if call is None or (printed and not (yield from reader.starts(")"))):
            return None
        return [call]


FORMATS = (
    ToolFormat(
        name="gemma3",
        parser=lambda reply: Gemma3Parser(names(reply.tools)),
        syntax=lambda control: CallSyntax(
            call=python_call, trigger=OPEN, lead="\n", comma="\n", close="\n```"
        ),
        template_patterns=(TemplatePattern(10, ("tool_code",)),),
    ),
)
