"""DeepSeek's calls: V3 and R1 fence their JSON and name a type first, V3.1 does neither."""

from __future__ import annotations

import re

from rekindle.chat.grammar.lark import Rules, either, literal
from rekindle.chat.grammar.syntax import CallSyntax, json_arguments
from rekindle.chat.grammar.tool import Tool
from rekindle.chat.tools.format import TemplatePattern, ToolFormat
from rekindle.chat.tools.json_calls import JsonCallParser
from rekindle.chat.tools.reader import MarkerFinder, Reading, Steps

_BAR = "\uff5c"  # a vertical line of full width


def _marker(text: str) -> str:
    return f"<{_BAR}{text}{_BAR}>"


# The small distilled models write the first marker in several ways.
ALL_BEGIN = tuple(map(_marker, ("tool▁calls▁begin", "tool_calls_begin", "tool calls begin")))
BEGIN, SEPARATOR = _marker("tool▁call▁begin"), _marker("tool▁sep")
END, ALL_END = _marker("tool▁call▁end"), _marker("tool▁calls▁end")
MARKERS = (*ALL_BEGIN, BEGIN, SEPARATOR, END, ALL_END)

_TYPE = "function"
_NAME = re.compile(r"[\w.:/-]*")
_FENCES = ("```json", "```")
_ENDS = MarkerFinder(BEGIN, END, ALL_END, "```")


class DeepSeekParser(JsonCallParser):
    """Calls between markers of their own, all of them between another pair."""

    opens = MarkerFinder(*ALL_BEGIN, BEGIN)
    closes = (END, ALL_END)
    stops = MarkerFinder(BEGIN, END, ALL_END)

    def _block(self, marker: str) -> Steps[None]:
        reader = self._reader
        reader.hold(marker)
        if marker != BEGIN:
            yield from reader.space()
        begun = marker == BEGIN or (yield from reader.starts(BEGIN))
        name = (yield from self._called()) if begun else None
        if not name:
            yield from self._release_as_text()
            return
        yield self._start_call(name)
        yield from self._fenced()

    def _called(self) -> Reading[str | None]:
        """The name of a call whose arguments, or end, come next; None when this is no call."""
        reader = self._reader
        yield from reader.space()
        name = yield from reader.run(_NAME)
        if not (yield from reader.starts(SEPARATOR)):
            return None
        yield from reader.space()
        if name == _TYPE and (yield from reader.peek()) != "{":
            name = yield from reader.run(_NAME)
            yield from reader.space()
            yield from reader.starts(*_FENCES)
            yield from reader.space()
        return name if (yield from reader.peek()) else None

    def _fenced(self) -> Steps[None]:
        reader = self._reader
        if (yield from reader.peek()) != "{":
            yield from self._raw_arguments(_ENDS)
        elif (yield from self._read_arguments()):
            self._end_call()
        yield from reader.space()
        yield from reader.starts("```")


def _call(rules: Rules, tool: Tool) -> str:
    """As V3 and R1 write it, or as V3.1 does: the model knows which it is."""
    name, arguments = literal(tool.name), json_arguments(rules, tool)
    separator = rules.marker(SEPARATOR)
    fence, fence_end = literal("\n```json\n"), literal("\n```")
    fenced = f"{literal(_TYPE)} {separator} {name} {fence} {arguments} {fence_end}"
    ways = either((fenced, f"{name} {separator} {arguments}"))
    return f"{rules.marker(BEGIN)} {ways} {rules.marker(END)}"


FORMATS = (
    ToolFormat(
        name="deepseek",
        parser=lambda reply: DeepSeekParser(),
        syntax=lambda control: CallSyntax(call=_call, trigger=ALL_BEGIN[0], close=ALL_END),
        template_patterns=(TemplatePattern(85, (BEGIN,)),),
        markers=MARKERS,
    ),
)
