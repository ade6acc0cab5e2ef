"""DeepSeek's calls. V3 and R1 write a type first and fence the JSON, V3.1 does neither."""

from __future__ import annotations

from rekindle.chat.grammar.arguments import Tool
from rekindle.chat.grammar.lark import Rules, either, literal
from rekindle.chat.grammar.reply import CallSyntax, json_arguments
from rekindle.chat.tools.format import ToolFormat
from rekindle.chat.tools.json_calls import JsonCallParser
from rekindle.chat.tools.stream import NAME, MarkerFinder, Reading, Steps


def _marker(text: str) -> str:
    return f"<\uff5c{text}\uff5c>"  # between full-width vertical lines


# The small distilled models write the first marker in several ways.
ALL_BEGIN = tuple(map(_marker, ("tool▁calls▁begin", "tool_calls_begin", "tool calls begin")))
BEGIN, SEPARATOR = _marker("tool▁call▁begin"), _marker("tool▁sep")
END, ALL_END = _marker("tool▁call▁end"), _marker("tool▁calls▁end")
MARKERS = (*ALL_BEGIN, BEGIN, SEPARATOR, END, ALL_END)

_TYPE = "function"
_ENDS = MarkerFinder(BEGIN, END, ALL_END, "```")


class DeepSeekParser(JsonCallParser):
    """Each call is between two markers, and all calls are between another pair."""

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
        if (yield from reader.peek()) != "{":
            yield from self._raw_arguments(_ENDS)
        elif (yield from self._read_arguments()):
            self._end_call()
        yield from reader.space()
        yield from reader.starts("```")

    def _called(self) -> Reading[str | None]:
        """The name of a call whose arguments or end come next, or None without a call."""
        reader = self._reader
        yield from reader.space()
        name = yield from reader.run(NAME)
        if not (yield from reader.starts(SEPARATOR)):
            return None
        yield from reader.space()
        if name == _TYPE and (yield from reader.peek()) != "{":
            name = yield from reader.run(NAME)
            yield from reader.space()
            yield from reader.starts("```json", "```")
            yield from reader.space()
        return name if (yield from reader.peek()) else None


def _call(rules: Rules, tool: Tool) -> str:
    """Both forms are allowed, because the model knows its own."""
    name, arguments = literal(tool.name), json_arguments(rules, tool)
    separator = rules.marker(SEPARATOR)
    fence, fence_end = literal("\n```json\n"), literal("\n```")
    fenced = f"{literal(_TYPE)} {separator} {name} {fence} {arguments} {fence_end}"
    ways = either((fenced, f"{name} {separator} {arguments}"))
    return f"{rules.marker(BEGIN)} {ways} {rules.marker(END)}"


FORMAT = ToolFormat(
    name="deepseek",
    parser=DeepSeekParser,
    syntax=lambda control: CallSyntax(call=_call, trigger=ALL_BEGIN[0], close=ALL_END),
    markers=MARKERS,
)
