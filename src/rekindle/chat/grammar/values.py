"""Values in other notations than JSON, as grammars."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llguidance import regex_to_lark

from rekindle.chat.grammar.lark import TEXT, Rules, either, literal
from rekindle.chat.grammar.schema import refusal
from rekindle.chat.grammar.tool import PARAM, Member, Tool
from rekindle.errors import Unsupported

_STRING_LIMITS = ("pattern", "minLength", "maxLength")  # of strings, besides `format`
_PLAIN = frozenset(("type", "title", "description", "default", "examples"))


@dataclass(frozen=True, slots=True)
class Notation:
    """How a notation writes constants, strings and the members of objects."""

    words: Mapping[str, str]  # how it writes true, false and null
    quote: str  # around strings; empty for JSON's own strings
    key: Callable[[str], str]  # a property's name and what separates it from the value
    comma: str


PYTHON = Notation(
    words={"true": "True", "false": "False", "null": "None"},
    quote="",
    key=lambda name: f"{json.dumps(name, ensure_ascii=False)}: ",
    comma=", ",
)


class Values:
    """Writes the values of one tool's arguments as rules."""

    def __init__(self, rules: Rules, tool: Tool, notation: Notation) -> None:
        self._rules = rules
        self._tool = tool
        self._notation = notation
        self._known: dict[int, tuple[Mapping[str, Any], str]] = {}  # by id, hence kept alive

    def of(self, schema: Mapping[str, Any]) -> str:
        """The rule of a schema's values; schemas may contain themselves."""
        schema = self._tool.resolved(schema)
        if id(schema) in self._known:
            return self._known[id(schema)][1]

        def body(name: str) -> str:
            self._known[id(schema)] = (schema, name)
            return self._body(schema)

        return self._rules.recursive(body)

    def _body(self, schema: Mapping[str, Any]) -> str:
        if ways := options(schema):
            return either(self.of(way) for way in ways)
        match schema:
            case {"const": constant}:
                return self._constants([constant])
            case {"enum": [_, *_] as constants}:
                return self._constants(constants)
            case {"type": "boolean"}:
                return self._constants([True, False])
            case {"type": "null"}:
                return self._constants([None])
            case {"type": "string"} if self._notation.quote:
                return quoted(self._rules, self._tool, schema, self._notation.quote)
            case {"type": "array", "items": dict() as items} if _is_list(schema):
                return self._array(schema, items)
            case {"type": "object", "properties": dict()} if _is_object(schema):
                return "{} {} {}".format('"{"', self.object(schema), '"}"')
        return json_value(self._rules, self._tool, schema)

    def object(self, schema: Mapping[str, Any]) -> str:
        """The members of an object, without the brackets."""
        return self.members(self._notation.key, self._tool.members(schema))

    def members(self, key: Callable[[str], str], members: Sequence[Member]) -> str:
        found = [
            (f"{literal(key(member.name))} {self.of(member.schema)}", member.required)
            for member in members
        ]
        return member_list(self._rules, found, self._notation.comma)

    def _constants(self, constants: list[Any]) -> str:
        return either(self._constant(constant) for constant in constants)

    def _constant(self, constant: Any) -> str:
        text = json.dumps(constant, ensure_ascii=False)
        if isinstance(constant, str) and self._notation.quote:
            quote = self._rules.marker(self._notation.quote)
            return f"{quote} {literal(constant)} {quote}"
        return literal(self._notation.words.get(text, text))

    def _array(self, schema: Mapping[str, Any], items: Mapping[str, Any]) -> str:
        item = self.of(items)
        least, most = int(schema.get("minItems", 0)), schema.get("maxItems")
        if most == 0:
            return literal("[]")
        times = f"{{{max(0, least - 1)},{'' if most is None else int(most) - 1}}}"
        some = f"{item} ({literal(self._notation.comma)} {item}){times}"
        return f'"[" {some} "]"' if least else f'"[" ({some})? "]"'


def json_value(rules: Rules, tool: Tool, schema: Mapping[str, Any]) -> str:
    """JSON of a schema inside a tool's."""
    whole = tool.whole(schema)
    if not refusal(whole, lenient=tool.lenient):
        return rules.json(whole, lenient=tool.lenient)
    if tool.strict:
        raise Unsupported(
            f"Of the function {tool.name!r}: references may only point to definitions.", param=PARAM
        )
    return rules.json({})


def options(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The alternatives of a schema that consists of nothing else."""
    for way in ("anyOf", "oneOf"):
        if way in schema and not schema.keys() - _PLAIN - {way, "$defs", "definitions"}:
            return [each for each in schema[way] if isinstance(each, Mapping)]
    types = schema.get("type")
    if isinstance(types, list) and not schema.keys() & {"enum", "const"}:
        return [{**schema, "type": each} for each in types]
    return []


def member_list(rules: Rules, members: Sequence[tuple[str, bool]], comma: str) -> str:
    """Members in order, with commas between them; those not required may be left out."""
    first = rest = ""
    for expression, required in reversed(members):
        member = rules.rule(expression)
        begun = f"{member} {rest}"
        more = f"{literal(comma)} {member}"
        first = rules.rule(begun if required else either((begun, first or '""')))
        rest = rules.rule(f"{more if required else f'({more})?'} {rest}")
    return first or '""'


def quoted(rules: Rules, tool: Tool, schema: Mapping[str, Any], quote: str) -> str:
    """A string between quotes; it has no escapes."""
    return f"{rules.marker(quote)} {rules.until(quote, bare_string(rules, tool, schema))}"


def bare_string(rules: Rules, tool: Tool, schema: Mapping[str, Any]) -> str:
    """Text without quotes that matches a string's schema."""
    if "format" in schema and tool.strict:
        raise Unsupported(
            f"Of the function {tool.name!r}: this model writes strings in a way in which the "
            f"format {schema['format']!r} cannot be enforced.",
            param=PARAM,
        )
    if not schema.keys() & set(_STRING_LIMITS) or tool.lenient:
        return rules.text
    least, most = int(schema.get("minLength", 0)), schema.get("maxLength")
    length = f"/(?s:.{{{least},{'' if most is None else int(most)}}})/"
    if "pattern" not in schema:
        return rules.terminal(length)
    return rules.terminal(f"{length} & /{regex_to_lark(_searched(schema['pattern']), 'dw')}/")


def _searched(pattern: str) -> str:
    """A pattern that matches whole texts in which the given one is found."""
    ends = pattern.endswith("$") and not pattern.endswith("\\$")
    body = pattern.removeprefix("^").removesuffix("$") if ends else pattern.removeprefix("^")
    before = "" if pattern.startswith("^") else TEXT
    return f"{before}(?:{body}){'' if ends else TEXT}"


def _is_list(schema: Mapping[str, Any]) -> bool:
    """Whether an array's schema has nothing but items and their number."""
    return not schema.keys() - _PLAIN - {"items", "minItems", "maxItems"}


def _is_object(schema: Mapping[str, Any]) -> bool:
    known = {"properties", "required", "additionalProperties", "$defs", "definitions"}
    return not schema.keys() - _PLAIN - known
