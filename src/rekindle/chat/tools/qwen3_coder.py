"""Qwen3-Coder's calls: `<function=name><parameter=key>value</parameter></function>`.

Values are bare text, and the tool's schema determines their types. Seed-OSS writes the same inside
another tag.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rekindle.chat.grammar.arguments import Member, Tool, alternatives, bare_string, json_value
from rekindle.chat.grammar.lark import Rules, either, literal
from rekindle.chat.grammar.reply import CallSyntax
from rekindle.chat.grammar.schema import resolve
from rekindle.chat.messages import dump_json
from rekindle.chat.tools.format import ControlTokens, ToolFormat
from rekindle.chat.tools.literals import NUMBER, PYTHON, is_json, read_literal
from rekindle.chat.tools.stream import (
    MarkerFinder,
    Reading,
    Steps,
    StreamParser,
    StreamReader,
    completed,
)

TAGS = ("<tool_call>", "<seed:tool_call>")
TAG_ENDS = ("</tool_call>", "</seed:tool_call>")
FUNCTION, PARAMETER = "<function=", "<parameter="
VALUE_END, FUNCTION_END = "</parameter>", "</function>"
CLOSES = (FUNCTION_END, *TAG_ENDS)

_NAME = re.compile(r"[^<>\n]*")
# A value without its own end tag ends at the line of the next value, or of the function's end.
_VALUE_ENDS = MarkerFinder(VALUE_END, "\n" + PARAMETER, "\n" + FUNCTION_END)


class Qwen3CoderParser(StreamParser):
    opens = MarkerFinder(*TAGS, FUNCTION)
    closes = CLOSES

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
        """The name in a tag, up to the tag's end, or None without a name."""
        name = yield from self._reader.run(_NAME)
        return name.strip() or None if (yield from self._reader.starts(">")) else None

    def _next_tag(self) -> Reading[str | None]:
        yield from self._reader.space()
        return (yield from self._reader.starts(PARAMETER, *CLOSES))

    def _parameters(self, name: str, following: str | None) -> Steps[None]:
        before = "{"
        schemas = properties(self._functions.get(name, {}))
        while following == PARAMETER:
            self._reader.hold(PARAMETER)
            key = yield from self._tag_rest()
            if key is None:
                following = None
                break
            text, end = yield from self._value()
            if end is None:  # cut off, so the arguments stay invalid JSON
                yield self._arguments(f"{before}{dump_json(key)}: {dump_json(text)[:-1]}")
                return
            yield self._arguments(f"{before}{dump_json(key)}: {typed(text, schemas.get(key))}")
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
        """The text of a value without the line feeds around it, and the marker that ended it."""
        text, end = yield from self._reader.all_until(_VALUE_ENDS)
        text = text.removeprefix("\n")
        if end != VALUE_END:
            return text, end
        self._reader.skip(len(end))
        return text.removesuffix("\n"), end


def properties(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schemas of a function's parameters, by name."""
    parameters = function.get("parameters")
    members = parameters.get("properties") if isinstance(parameters, Mapping) else None
    schemas = members if isinstance(members, Mapping) else {}
    return {name: _resolved(schema, parameters) for name, schema in schemas.items()}


def _resolved(schema: Any, parameters: Any) -> Any:
    """A parameter's schema with its reference followed, if it has a valid one."""
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    return schema if reference is None else resolve(parameters, reference) or schema


_TYPES = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    list: "array",
    dict: "object",
}
_WORDS = {"boolean": {"true": "true", "false": "false"}, "null": {"null": "null", "none": "null"}}


def _types(schema: Any, levels: int = 8) -> frozenset[str]:
    """The JSON types that a schema allows. Empty if it names none."""
    if not isinstance(schema, Mapping) or levels < 0:
        return frozenset()
    named = schema.get("type")
    found = {name for name in _listed(named) if isinstance(name, str)}
    if isinstance(named, str):
        found.add(named)
    values = [*_listed(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
    found |= {_TYPES[type(value)] for value in values if type(value) in _TYPES and not found}
    for way in ("anyOf", "oneOf", "allOf"):
        for option in _listed(schema.get(way)):
            found |= _types(option, levels - 1)
    return frozenset(found)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def typed(text: str, schema: Any) -> str:
    """The JSON of a value that is bare text. It is a string if no other type fits."""
    allowed = _types(schema)
    word = text.strip()
    for type_, words in _WORDS.items():
        if type_ in allowed and word.lower() in words:
            return words[word.lower()]
    if "string" in allowed:
        return dump_json(text)
    if allowed & {"integer", "number"} and NUMBER.fullmatch(word):
        return word
    value = _nested(word) if allowed & {"object", "array"} else None
    return dump_json(text) if value is None else value


def _nested(word: str) -> str | None:
    if word[:1] not in ("{", "["):
        return None
    if is_json(word):
        return word
    reader = StreamReader(word, ended=True)
    value = completed(read_literal(reader, PYTHON))
    return None if reader.rest().strip() else value


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
    """A value in a tag. Strings are bare, all other values are JSON."""
    end = "\n</parameter>\n"
    constants = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if constants and all(isinstance(each, str) for each in constants):
        return f"{either(map(literal, constants))} {literal(end)}"
    if not _is_bare(tool, schema):
        return f"{json_value(rules, tool, schema)} {literal(end)}"
    return rules.until(end, bare_string(rules, tool, schema))


def _is_bare(tool: Tool, schema: Mapping[str, Any], levels: int = 4) -> bool:
    """Whether a value may be a string. Then the parser reads it as one."""
    if levels and (ways := alternatives(schema)):
        return any(_is_bare(tool, tool.resolved(way), levels - 1) for way in ways)
    return schema.get("type", "string") == "string" and "enum" not in schema


FORMAT = ToolFormat(
    name="qwen3-coder",
    parser=Qwen3CoderParser,
    syntax=_syntax,
    markers=(*TAGS, *TAG_ENDS),
)
