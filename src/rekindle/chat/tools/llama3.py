"""Llama's JSON calls: `{"name": …, "parameters": {…}}`, often without any marker."""

from __future__ import annotations

import re

from rekindle.chat.grammar.arguments import Tool
from rekindle.chat.grammar.lark import Rules
from rekindle.chat.grammar.reply import CallSyntax
from rekindle.chat.grammar.schema import relocated
from rekindle.chat.tools.format import ControlTokens, ToolFormat
from rekindle.chat.tools.json_calls import ARGUMENTS, NAMES, JsonCallParser
from rekindle.chat.tools.stream import MarkerFinder, Steps

TAG, START, END = "<|python_tag|>", "<|python_start|>", "<|python_end|>"
MARKERS = (TAG, START, END)

_BETWEEN = re.compile(r"[\s;]*")
_CUT_NAME = re.compile(r'"(?:name|function)"\s*:\s*"([^"\\]*)$')
_CUT_KEY = re.compile(r'\s*\{\s*"([^"\\]*)')


class Llama3Parser(JsonCallParser):
    """Reads calls of known tools, at the beginning of the reply or after a marker."""

    begins_with_block = True
    opens = MarkerFinder(TAG, START)
    closes = (END,)
    stops = MarkerFinder(*MARKERS)
    keys = (*NAMES, *ARGUMENTS, "type", "id")  # with any other key it is an answer in JSON

    def _accepts(self, name: str) -> bool:
        return name in self._functions

    def _may_be_call(self, held: str) -> bool:
        """Whether the cut text may be the first key of a call, or the name of a known tool."""
        if name := _CUT_NAME.search(held):
            return any(known.startswith(name[1]) for known in self._functions)
        if key := _CUT_KEY.fullmatch(held):
            return bool(key[1]) and any(known.startswith(key[1]) for known in self.keys)
        return super()._may_be_call(held)

    def _block(self, marker: str) -> Steps[None]:
        self._reader.hold(marker)
        yield from self._reader.space()
        while (yield from self._object()):
            self._reader.hold()
            yield from self._reader.run(_BETWEEN)
        yield from self._release_as_text()


def _syntax(control: ControlTokens) -> CallSyntax:
    trigger = TAG if TAG in control else ""
    return CallSyntax(call=_call, trigger=trigger, optional_trigger=True, comma="; ", bare="{")


def _call(rules: Rules, tool: Tool) -> str:
    """The whole call as one schema, because an answer in JSON may begin like a call."""
    place = "#/properties/parameters"
    schema = {
        "type": "object",
        "properties": {"name": {"const": tool.name}, "parameters": relocated(tool.schema, place)},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
    return rules.json(schema, lenient=tool.lenient)


FORMAT = ToolFormat(name="llama3-json", parser=Llama3Parser, syntax=_syntax, markers=MARKERS)
