"""Gemma 3's calls: Python in a block that is fenced as tool_code."""

from __future__ import annotations

import re

from rekindle.chat.grammar.reply import CallSyntax
from rekindle.chat.tools.format import ToolFormat
from rekindle.chat.tools.pythonic import PythonCall, python_call, read_call, read_calls
from rekindle.chat.tools.stream import MarkerFinder, Reading, Steps, StreamParser

OPEN, CLOSE = "```tool_code", "```"

_BETWEEN = re.compile(r"[\s;]*")


class Gemma3Parser(StreamParser):
    """Reads blocks that have only calls of known tools. Any other block is text."""

    opens = MarkerFinder(OPEN)

    def _block(self, marker: str) -> Steps[None]:
        self._reader.hold(marker)
        calls = yield from self._statements()
        if not calls:
            yield from self._release_as_text()
        for call in calls:
            yield from self._whole_call(*call)

    def _statements(self) -> Reading[list[PythonCall]]:
        """All calls of a block, or none if it has anything else."""
        reader = self._reader
        found: list[PythonCall] = []
        while True:
            yield from reader.run(_BETWEEN)
            if (yield from reader.starts(CLOSE)) or not (yield from reader.peek()):
                return found
            calls = yield from self._statement()
            if not calls:
                return []
            found += calls

    def _statement(self) -> Reading[list[PythonCall] | None]:
        reader = self._reader
        if (yield from reader.peek()) == "[":
            return (yield from read_calls(reader, self._functions))
        printed = yield from reader.starts("print(")  # many prompts teach the model to print
        call = yield from read_call(reader, self._functions)
        if call is None or (printed and not (yield from reader.starts(")"))):
            return None
        return [call]


FORMAT = ToolFormat(
    name="gemma3",
    parser=Gemma3Parser,
    syntax=lambda control: CallSyntax(
        call=python_call, trigger=OPEN, lead="\n", comma="\n", close="\n```"
    ),
)
