"""Calls as a Python list, `[f(a=1), g()]`: Llama 3.2 and 4, LFM2, and models trained like them."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

from rekindle.chat.grammar.arguments import PARAM, PYTHON_NOTATION, Tool, Values
from rekindle.chat.grammar.lark import Rules, literal
from rekindle.chat.grammar.reply import CallSyntax
from rekindle.chat.messages import dump_json
from rekindle.chat.tools.format import ControlTokens, ToolFormat
from rekindle.chat.tools.literals import PYTHON, read_literal
from rekindle.chat.tools.stream import MarkerFinder, Reading, Steps, StreamParser, StreamReader
from rekindle.errors import Unsupported

OPENS = ("<|python_start|>", "<|tool_call_start|>")
CLOSES = ("<|python_end|>", "<|tool_call_end|>")
MARKERS = OPENS + CLOSES

_FIRST_NAME = re.compile(r"\s*\[\s*([\w.-]*)")
_NAME = re.compile(r"[\w.-]*")
_KEY = re.compile(r"\w*")
_IDENTIFIER = re.compile(r"\w+")


class PythonCall(NamedTuple):
    name: str
    arguments: str  # JSON


def read_call(reader: StreamReader, names: Collection[str]) -> Reading[PythonCall | None]:
    """The next call, `name(key=value, …)`, or None if it is not a call of a known tool."""
    name = yield from reader.run(_NAME)
    if name not in names:
        return None
    yield from reader.space()
    if not (yield from reader.starts("(")):
        return None
    pairs: list[str] = []
    while True:
        yield from reader.space()
        if (yield from reader.starts(")")):
            return PythonCall(name, "{" + ", ".join(pairs) + "}")
        key = yield from reader.run(_KEY)
        yield from reader.space()
        if not key or not (yield from reader.starts("=")):
            return None
        value = yield from read_literal(reader, PYTHON)
        if value is None:
            return None
        pairs.append(f"{dump_json(key)}: {value}")
        yield from reader.space()
        yield from reader.starts(",")


def read_calls(reader: StreamReader, names: Collection[str]) -> Reading[list[PythonCall] | None]:
    """A list of calls in brackets, or None. The end of the text may replace the last bracket."""
    if not (yield from reader.starts("[")):
        return None
    found: list[PythonCall] = []
    while True:
        yield from reader.space()
        if found and (yield from reader.starts("]")):
            return found
        call = yield from read_call(reader, names)
        if call is None:
            return None
        found.append(call)
        yield from reader.space()
        if not (yield from reader.starts(",")) and (yield from reader.peek()) not in ("]", ""):
            return None
        if not (yield from reader.peek()):
            return found


class PythonicParser(StreamParser):
    """Reads lists of calls of known tools, at the beginning of the reply or after a marker.

    It passes a list on as a whole, because the last name may still make it a text.
    """

    begins_with_block = True
    opens = MarkerFinder(*OPENS)
    closes = CLOSES

    def _may_be_call(self, held: str) -> bool:
        """Whether the first name in the list may be that of a known tool."""
        if any(marker in held for marker in MARKERS):
            return True
        found = _FIRST_NAME.match(held)
        name = found[1] if found else ""
        return bool(name) and any(known.startswith(name) for known in self._functions)

    def _block(self, marker: str) -> Steps[None]:
        reader = self._reader
        reader.hold(marker)
        yield from reader.space()
        while calls := (yield from read_calls(reader, self._functions)):
            for call in calls:
                yield from self._whole_call(*call)
            reader.hold()
            yield from reader.space()
        yield from self._release_as_text()


def python_call(rules: Rules, tool: Tool) -> str:
    members = tool.arguments()
    odd = [member for member in members if not _IDENTIFIER.fullmatch(member.name)]
    if any(member.required for member in odd):
        raise Unsupported(
            f"This model writes calls in Python, which cannot pass {odd[0].name!r} to "
            f"{tool.name!r}.",
            param=PARAM,
        )
    known = [member for member in members if member not in odd]
    arguments = Values(rules, tool, PYTHON_NOTATION).members(lambda name: f"{name}=", known)
    return f"{literal(tool.name + '(')} {arguments} {literal(')')}"


def _syntax(control: ControlTokens) -> CallSyntax:
    trigger, close = "", "]"
    for name in ("tool_call", "python"):
        if f"<|{name}_start|>" in control:
            trigger, close = f"<|{name}_start|>", f"]<|{name}_end|>"
            break
    return CallSyntax(
        call=python_call, trigger=trigger, lead="[", comma=", ", close=close, bare="["
    )


FORMAT = ToolFormat(name="pythonic", parser=PythonicParser, syntax=_syntax, markers=MARKERS)
