"""`<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen 2.5 and 3, and many more.

Phi-4 mini, Granite 3 and Nemotron Nano 2 use other markers. They and SmolLM2 write a list of calls
between one pair of markers.
"""

from __future__ import annotations

import re

from rekindle.chat.grammar.reply import CallSyntax, json_call
from rekindle.chat.tools.format import ControlTokens, ToolFormat
from rekindle.chat.tools.json_calls import JsonCallParser
from rekindle.chat.tools.stream import MarkerFinder, Steps

OPENS = ("<tool_call>", "<|tool_call|>", "<TOOLCALL>")
CLOSES = ("</tool_call>", "<|/tool_call|>", "</TOOLCALL>")
MARKERS = OPENS + CLOSES

_SURPLUS = re.compile(r"[\s}\]]*")


class HermesParser(JsonCallParser):
    opens = MarkerFinder(*OPENS)
    closes = CLOSES
    stops = MarkerFinder(*MARKERS)

    def _block(self, marker: str) -> Steps[None]:
        reader = self._reader
        reader.hold(marker)
        yield from reader.space()
        if not (yield from self._objects()):
            yield from self._release_as_text()
            return
        reader.hold()
        yield from reader.run(_SURPLUS)  # models often write one brace too many
        if (yield from reader.starts(*CLOSES)) or not (yield from reader.peek()):
            reader.drop()
        else:
            yield from self._release_as_text()


def _syntax(control: ControlTokens) -> CallSyntax:
    tag = "<|tool_call|>"
    if tag in control:
        end = "<|/tool_call|>"
        close = "]" + (end if end in control else "")
        return CallSyntax(call=json_call, trigger=tag, lead="[", comma=", ", close=close)
    return CallSyntax(
        call=json_call, trigger="<tool_call>", lead="\n", close="\n</tool_call>", gap="\n"
    )


FORMAT = ToolFormat(name="hermes", parser=HermesParser, syntax=_syntax, markers=MARKERS)
