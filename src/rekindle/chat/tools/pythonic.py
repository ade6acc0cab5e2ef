"""Calls as a Python list, `[f(a=1), g()]`: Llama 3.2 and 4, LFM2, and models trained like them."""

from __future__ import annotations

import re
from collections.abc import Collection

from rekindle.chat.grammar.syntax import CallSyntax
from rekindle.chat.tools.base import StreamParser
from rekindle.chat.tools.format import ControlTokens, TemplatePattern, ToolFormat, names
from rekindle.chat.tools.python_calls import python_call, signatures
from rekindle.chat.tools.reader import MarkerFinder, Steps

OPENS = ("<|python_start|>", "<|tool_call_start|>")
CLOSES = ("<|python_end|>", "<|tool_call_end|>")
MARKERS = OPENS + CLOSES

_FIRST_NAME = re.compile(r"\s*\[\s*([\w.-]*)")


class PythonicParser(StreamParser):
    """Lists of calls of known tools, at the beginning of the reply or after a marker.

    A list is handed out whole: its last name may still make it a text.
    """

    opens = MarkerFinder(*OPENS)
    closes = CLOSES

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._names = names

    def _may_be_call(self, held: str) -> bool:
        """Whether the first name in the list may be that of a known tool."""
        if any(marker in held for marker in MARKERS):
            return True
        found = _FIRST_NAME.match(held)
        name = found[1] if found else ""
        return bool(name) and any(known.startswith(name) for known in self._names)

    def _run(self) -> Steps[None]:
        yield from self._block("")
        yield from super()._run()

    def _block(self, marker: str) -> Steps[None]:
        reader = self._reader
        reader.hold(marker)
        yield from reader.space()
        while calls := (yield from signatures(reader, self._names)):
            for name, arguments in calls:
                yield self._start_call(name)
                yield self._arguments(arguments)
                self._end_call()
            reader.hold()
            yield from reader.space()
        yield from self._release_as_text()


def _syntax(control: ControlTokens) -> CallSyntax:
    trigger, close = "", "]"
    for name in ("tool_call", "python"):
        if f"<|{name}_start|>" in control:
            trigger, close = f"<|{name}_start|>", f"]<|{name}_end|>"
            break
    return CallSyntax(
        call=python_call, trigger=trigger, lead="[", comma=", ", close=close, bare="["
    )


FORMATS = (
    ToolFormat(
        name="pythonic",
        parser=lambda reply: PythonicParser(names(reply.tools)),
        syntax=_syntax,
        template_patterns=(
            TemplatePattern(60, ("[func_name1(params_name1=",)),
            TemplatePattern(60, ("<|tool_call_start|>",)),
            TemplatePattern(40, ("<|python_start|>",)),  # unless the template requests llama3-json
        ),
        markers=MARKERS,
    ),
)
