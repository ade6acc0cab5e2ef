"""`[TOOL_CALLS][{"name": …, "arguments": {…}}]` and the newer `[TOOL_CALLS]name[ARGS]{…}`."""

from __future__ import annotations

import re

from rekindle.chat.grammar.arguments import Tool
from rekindle.chat.grammar.lark import Rules, literal
from rekindle.chat.grammar.reply import CallSyntax, json_arguments, json_call
from rekindle.chat.tools.format import ControlTokens, ToolFormat
from rekindle.chat.tools.json_calls import JsonCallParser
from rekindle.chat.tools.stream import NAME, MarkerFinder, Reading, Steps

OPEN, ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
MARKERS = (OPEN, ID, ARGS)

_ID = re.compile(r"\w*")


class MistralParser(JsonCallParser):
    """A marker begins each call, or a list of calls. Nothing marks their end."""

    opens = MarkerFinder(OPEN)
    stops = MarkerFinder(OPEN)

    def _block(self, marker: str) -> Steps[None]:
        reader = self._reader
        reader.hold(marker)
        yield from reader.space()
        if (yield from reader.peek()) in ("[", "{"):
            if not (yield from self._objects()):
                yield from self._release_as_text()
            return
        name = yield from reader.run(NAME)
        if not (name and (yield from self._has_arguments())):
            yield from self._release_as_text()
            return
        yield self._start_call(name)
        yield from reader.space()
        if (yield from reader.peek()) != "{":
            yield from self._raw_arguments(self.stops)
        elif (yield from self._read_arguments()):
            self._end_call()

    def _has_arguments(self) -> Reading[bool]:
        """Whether arguments follow a name, with or without their marker."""
        reader = self._reader
        yield from reader.space()
        if (yield from reader.starts(ID)):
            yield from reader.run(_ID)
        if (yield from reader.starts(ARGS)):
            return True
        return (yield from reader.peek()) == "{"


def _syntax(control: ControlTokens) -> CallSyntax:
    if ARGS in control:
        return CallSyntax(call=_named_call, trigger=OPEN, gap="")
    return CallSyntax(call=json_call, trigger=OPEN, lead="[", comma=", ", close="]")


def _named_call(rules: Rules, tool: Tool) -> str:
    return f"{literal(tool.name)} {rules.marker(ARGS)} {json_arguments(rules, tool)}"


FORMAT = ToolFormat(name="mistral", parser=MistralParser, syntax=_syntax, markers=MARKERS)
