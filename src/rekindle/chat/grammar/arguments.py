"""Writes the arguments of tools as grammar rules, in JSON and in other notations."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from llguidance import regex_to_lark

from rekindle.chat.grammar.lark import TEXT, Rules, either, literal
from rekindle.chat.grammar.schema import (
    ANY_OBJECT,
    DEFINITIONS,
    REMARKS,
    Schema,
    check,
    check_size,
    check_values,
    refusal,
    resolve,
    with_definitions,
)
from rekindle.errors import BadRequest, Unsupported

PARAM = "tools"
_NO_ARGUMENTS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}
_OBJECT_KEYWORDS = frozenset(("properties", "required", "additionalProperties", *DEFINITIONS))
_PLAIN = frozenset(("type", "title", "description", "default", "examples"))


@dataclass(frozen=True, slots=True)
class Member:
    name: str
    schema: Schema
    required: bool


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    schema: Schema
    lenient: bool  # leave out what cannot be enforced
    strict: bool

    def resolved(self, schema: object) -> Schema:
        """A schema inside this tool's, with up to eight references followed."""
        for _ in range(8):
            if not isinstance(schema, Mapping):
                return {}
            target = resolve(self.schema, schema.get("$ref"))
            if target is None:
                return schema
            schema = target
        return {}

    def unsupported(self, problem: str) -> Unsupported:
        return Unsupported(f"In the function {self.name!r}: {problem}", param=PARAM)

    def arguments(self) -> list[Member]:
        """The arguments one by one, for notations other than JSON."""
        schema = self.resolved(self.schema)
        beyond = sorted(schema.keys() - _OBJECT_KEYWORDS - REMARKS - {"type"})
        if self.strict and beyond:
            raise self.unsupported(
                f"`{beyond[0]}` of the whole cannot be enforced in the notation in which this "
                "model writes arguments."
            )
        return self.members(schema)

    def members(self, schema: Schema) -> list[Member]:
        """The properties of an object, in order."""
        properties = schema.get("properties")
        found = dict(properties) if isinstance(properties, Mapping) else {}
        required = schema.get("required")
        needed = required if isinstance(required, list) else []
        for name in needed:
            found.setdefault(name, {})
        return [Member(name, self.resolved(found[name]), name in needed) for name in found]


def callable_tools(tools: Sequence[Mapping[str, Any]], name: str | None) -> list[Tool]:
    """The tools that may be called: all, or the named one."""
    functions = [tool["function"] for tool in tools]
    wanted = [each for each in functions if name is None or each["name"] == name]
    check_values([each.get("parameters") for each in wanted], PARAM)
    return [_tool(each) for each in wanted]


def _tool(function: Mapping[str, Any]) -> Tool:
    """Arguments are an object. If it names properties, it has no others by default."""
    name, strict = function["name"], bool(function.get("strict"))
    schema = {"type": "object", **(function.get("parameters") or _NO_ARGUMENTS)}
    if schema.get("properties"):
        schema.setdefault("additionalProperties", False)
    if not strict:
        return _enforceable(name, schema)
    try:
        check(schema, param=PARAM)
    except BadRequest as error:
        raise type(error)(f"In the function {name!r}: {error}", param=PARAM) from None
    return Tool(name, schema, lenient=False, strict=True)


def _enforceable(name: str, schema: Schema) -> Tool:
    with suppress(BadRequest):
        check_size(schema, PARAM)
        for lenient in (False, True):
            if not refusal(schema, lenient=lenient):
                return Tool(name, schema, lenient=lenient, strict=False)
    return Tool(name, ANY_OBJECT, lenient=True, strict=False)


@dataclass(frozen=True, slots=True)
class Notation:
    """How a notation writes constants, strings and the members of objects."""

    words: Mapping[str, str]  # the format's words for JSON's true, false and null
    quote: str  # the quote around strings. Empty for JSON's own strings
    key: Callable[[str], str]  # writes a property's name and the separator after it
    comma: str


PYTHON_NOTATION = Notation(
    words={"true": "True", "false": "False", "null": "None"},
    quote="",
    key=lambda name: f"{literal(name)}: ",
    comma=", ",
)


class Values:
    """Writes the values of one tool's arguments as rules, in a notation other than JSON."""

    def __init__(self, rules: Rules, tool: Tool, notation: Notation) -> None:
        self._rules = rules
        self._tool = tool
        self._notation = notation
        self._known: dict[int, tuple[Schema, str]] = {}  # by id. The value keeps the schema alive

    def members(self, key: Callable[[str], str], members: Sequence[Member]) -> str:
        """Members in order, separated by commas. Optional ones may be left out."""
        first = rest = ""
        comma = literal(self._notation.comma)
        for member in reversed(members):
            value = self._rules.rule(f"{literal(key(member.name))} {self._of(member.schema)}")
            begun, more = f"{value} {rest}", f"{comma} {value}"
            required = member.required
            first = self._rules.rule(begun if required else either((begun, first or '""')))
            rest = self._rules.rule(f"{more if required else f'({more})?'} {rest}")
        return first or '""'

    def _of(self, schema: Schema) -> str:
        """The rule of a schema's values. A schema may contain itself."""
        schema = self._tool.resolved(schema)
        if id(schema) in self._known:
            return self._known[id(schema)][1]

        def body(name: str) -> str:
            self._known[id(schema)] = (schema, name)
            return self._body(schema)

        return self._rules.recursive(body)

    def _body(self, schema: Schema) -> str:
        if ways := alternatives(schema):
            return either(self._of(way) for way in ways)
        match schema:
            case {"const": constant}:
                return self._constants([constant])
            case {"enum": [_, *_] as constants}:
                return self._constants(constants)
            case {"type": "boolean"}:
                return self._constants([True, False])
            case {"type": "null"}:
                return self._constants([None])
            case {"type": "string"} if quote := self._notation.quote:
                text = bare_string(self._rules, self._tool, schema)
                return f"{self._rules.marker(quote)} {self._rules.until(quote, text)}"
            case {"type": "array", "items": dict() as items} if not (
                schema.keys() - _PLAIN - {"items", "minItems", "maxItems"}
            ):
                return self._array(schema, items)
            case {"type": "object", "properties": dict()} if not (
                schema.keys() - _PLAIN - _OBJECT_KEYWORDS
            ):
                members = self.members(self._notation.key, self._tool.members(schema))
                return f'"{{" {members} "}}"'
        return json_value(self._rules, self._tool, schema)

    def _constants(self, constants: list[Any]) -> str:
        return either(self._constant(constant) for constant in constants)

    def _constant(self, constant: Any) -> str:
        text = json.dumps(constant, ensure_ascii=False)
        if isinstance(constant, str) and self._notation.quote:
            quote = self._rules.marker(self._notation.quote)
            return f"{quote} {literal(constant)} {quote}"
        return literal(self._notation.words.get(text, text))

    def _array(self, schema: Schema, items: Schema) -> str:
        item = self._of(items)
        least, most = int(schema.get("minItems", 0)), schema.get("maxItems")
        if most == 0:
            return literal("[]")
        times = f"{{{max(0, least - 1)},{'' if most is None else int(most) - 1}}}"
        some = f"{item} ({literal(self._notation.comma)} {item}){times}"
        return f'"[" {some} "]"' if least else f'"[" ({some})? "]"'


def json_value(rules: Rules, tool: Tool, schema: Schema) -> str:
    whole = with_definitions(schema, tool.schema)
    if not refusal(whole, lenient=tool.lenient):
        return rules.json(whole, lenient=tool.lenient)
    if tool.strict:
        raise tool.unsupported("references may only point to definitions.")
    return rules.json({})


def alternatives(schema: Schema) -> list[Schema]:
    """The alternatives of a schema that consists only of them."""
    for way in ("anyOf", "oneOf"):
        if way in schema and not schema.keys() - _PLAIN - {way, *DEFINITIONS}:
            return [each for each in schema[way] if isinstance(each, Mapping)]
    types = schema.get("type")
    if isinstance(types, list) and not schema.keys() & {"enum", "const"}:
        return [{**schema, "type": each} for each in types]
    return []


def bare_string(rules: Rules, tool: Tool, schema: Schema) -> str:
    """Text without quotes and escapes that matches a string's schema."""
    if "format" in schema and tool.strict:
        raise tool.unsupported(
            f"the format {schema['format']!r} cannot be enforced in the notation in which this "
            "model writes strings."
        )
    if not schema.keys() & {"pattern", "minLength", "maxLength"} or tool.lenient:
        return rules.text
    least, most = int(schema.get("minLength", 0)), schema.get("maxLength")
    length = f"/(?s:.{{{least},{'' if most is None else int(most)}}})/"
    if "pattern" not in schema:
        return rules.terminal(length)
    return rules.terminal(f"{length} & /{regex_to_lark(_search(schema['pattern']), 'dw')}/")


def _search(pattern: str) -> str:
    """A pattern that matches whole texts in which the given one is found."""
    ends = pattern.endswith("$") and not pattern.endswith("\\$")
    body = pattern.removeprefix("^").removesuffix("$") if ends else pattern.removeprefix("^")
    before = "" if pattern.startswith("^") else TEXT
    return f"{before}(?:{body}){'' if ends else TEXT}"
