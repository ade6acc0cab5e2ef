"""Qwen3-Coder's calls: `<function=name><parameter=key>value</parameter></function>`.

Values are bare text; their types are in the tool's schema. Seed-OSS writes the same inside another
tag.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rekindle.chat.grammar.lark import Rules, either, literal
from rekindle.chat.grammar.syntax import CallSyntax
from rekindle.chat.grammar.tool import Member, Tool
from rekindle.chat.grammar.values import bare_string, json_value, options
from rekindle.chat.tools.base import StreamParser
from rekindle.chat.tools.format import (
    ControlTokens,
    TemplatePattern,
    ToolFormat,
    Tools,
    properties,
    typed,
)
from rekindle.chat.tools.reader import MarkerFinder, Reading, Steps
from rekindle.chat.tools.values import quoted

TAGS = ("<tool_call>", "<seed:tool_call>")
FUNCTION, PARAMETER = "<function=", "<parameter="
VALUE_END, FUNCTION_END = "</parameter>", "</function>"
CLOSES = (FUNCTION_END, "</tool_call>", "</seed:tool_call>")
MARKERS = (*TAGS, *CLOSES[1:])

_NAME = re.compile(r"[^<>\n]*")
# A value whose own end is missing ends where the next one, or the function's end, has its line.
_VALUE_ENDS = MarkerFinder(VALUE_END, "\n" + PARAMETER, "\n" + FUNCTION_END)


class Qwen3CoderParser(StreamParser):
    """Calls whose arguments come one whole value at a time."""

    opens = MarkerFinder(*TAGS, FUNCTION)
    closes = CLOSES

    def __init__(self, tools: Tools) -> None:
        super().__init__()
        self._properties = properties(tools)

    def _block(self, marker: str) -> Steps[None]:
        reader = self._reader
        reader.hold(marker)
        if marker != FUNCTION:
            yield from reader.space()
        begun = marker == FUNCTION or (yield from reader.starts(FUNCTION))
        name = (yield from self._tag_rest()) if begun else None
        following = (yield from self._next_tag()) if name else None
        if name is None or following is None:
            yield from self._release_as_text()
            return
        yield self._start_call(name)
        yield from self._parameters(name, following)

    def _tag_rest(self) -> Reading[str | None]:
        """The name in a tag, up to its end; None when there is none."""
        name = yield from self._reader.run(_NAME)
        return name.strip() or None if (yield from self._reader.starts(">")) else None

    def _next_tag(self) -> Reading[str | None]:
        yield from self._reader.space()
        return (yield from self._reader.starts(PARAMETER, *CLOSES))

    def _parameters(self, name: str, following: str | None) -> Steps[None]:
        before = "{"
        schemas = self._properties.get(name, {})
        while following == PARAMETER:
            self._reader.hold(PARAMETER)
            key = yield from self._tag_rest()
            if key is None:
                following = None
                break
            text, end = yield from self._value()
            if end is None:  # cut off: the arguments stay invalid JSON
                yield self._arguments(f"{before}{quoted(key)}: {quoted(text)[:-1]}")
                return
            yield self._arguments(f"{before}{quoted(key)}: {typed(text, schemas.get(key))}")
            before = ", "
            self._reader.drop()
            following = yield from self._next_tag()
        if following is None and self._is_cut_here:  # more parameters would have come
            self._reader.rest()
            return
        yield self._arguments("{}" if before == "{" else "}")
        self._end_call()
        yield from self._release_as_text()

    def _value(self) -> Reading[tuple[str, str | None]]:
        """A value's text, without the line feeds that set it apart, and what ended it."""
        pieces = []
        while True:
            text, end = yield from self._reader.until(_VALUE_ENDS)
            pieces.append(text)
            if end is not None or not text:
                break
        if end == VALUE_END:
            self._reader.skip(len(end))
        text = "".join(pieces).removeprefix("\n")
        return text.removesuffix("\n") if end == VALUE_END else text, end


def _syntax(control: ControlTokens) -> CallSyntax:
    tag = "seed:tool_call" if "<seed:tool_call>" in control else "tool_call"
    close = f"</function>\n</{tag}>"
    return CallSyntax(call=_call, trigger=f"<{tag}>", lead="\n", close=close, gap="\n")


def _call(rules: Rules, tool: Tool) -> str:
    parameters = (_parameter(rules, tool, member) for member in tool.arguments())
    return f"{literal(f'<function={tool.name}>' + chr(10))} {' '.join(parameters)}"


def _parameter(rules: Rules, tool: Tool, member: Member) -> str:
    tag = literal(f"<parameter={member.name}>\n")
    value = f"{tag} {_bare_value(rules, tool, member.schema)}"
    return value if member.required else f"({value})?"


def _bare_value(rules: Rules, tool: Tool, schema: Mapping[str, Any]) -> str:
    """A value in a tag: strings are bare, all else is JSON."""
    end = "\n</parameter>\n"
    constants = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if constants and all(isinstance(each, str) for each in constants):
        return f"{either(map(literal, constants))} {literal(end)}"
    if not _is_bare(tool, schema):
        return f"{json_value(rules, tool, schema)} {literal(end)}"
    return rules.until(end, bare_string(rules, tool, schema))


def _is_bare(tool: Tool, schema: Mapping[str, Any], levels: int = 4) -> bool:
    """Whether a value may be a string, and is then read as one."""
    if levels and (ways := options(schema)):
        return any(_is_bare(tool, tool.resolved(way), levels - 1) for way in ways)
    return schema.get("type", "string") == "string" and "enum" not in schema


FORMATS = (
    ToolFormat(
        name="qwen3-coder",
        parser=lambda reply: Qwen3CoderParser(reply.tools),
        syntax=_syntax,
        template_patterns=(TemplatePattern(75, (FUNCTION, PARAMETER)),),
        markers=MARKERS,
    ),
)
