"""A tool as a grammar needs it: its name, and the schema of its arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rekindle.chat.grammar.schema import (
    ANY_OBJECT,
    REMARKS,
    check,
    check_size,
    check_values,
    definitions,
    refusal,
    resolve,
)
from rekindle.errors import BadRequest, Unsupported

PARAM = "tools"
_NOTHING: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_MEMBERS = frozenset(
    ("type", "properties", "required", "additionalProperties", "$defs", "definitions")
)


@dataclass(frozen=True, slots=True)
class Member:
    """One argument, or one property of an object inside an argument."""

    name: str
    schema: Mapping[str, Any]
    required: bool


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    schema: Mapping[str, Any]  # of its arguments, all together
    lenient: bool  # what cannot be enforced is left out
    strict: bool

    def resolved(self, schema: object) -> Mapping[str, Any]:
        """A schema inside this tool's, with references followed."""
        for _ in range(8):
            if not isinstance(schema, Mapping):
                return {}
            target = resolve(self.schema, schema.get("$ref"))
            if target is None:
                return schema
            schema = target
        return {}

    def whole(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """A schema inside this tool's, with the definitions that it may refer to."""
        return {**schema, **definitions(self.schema)}

    def arguments(self) -> list[Member]:
        """The arguments one by one, as notations other than JSON write them."""
        schema = self.resolved(self.schema)
        if self.strict and (beyond := sorted(schema.keys() - _MEMBERS - REMARKS)):
            raise Unsupported(
                f"Of the function {self.name!r}: this model writes arguments in a way in which "
                f"`{beyond[0]}` of the whole cannot be enforced.",
                param=PARAM,
            )
        return self.members(schema)

    def members(self, schema: Mapping[str, Any]) -> list[Member]:
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


def is_strict(tools: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the schema of any tool is to be enforced."""
    return any(tool["function"].get("strict") for tool in tools)


def _tool(function: Mapping[str, Any]) -> Tool:
    name, strict = function["name"], bool(function.get("strict"))
    schema = _closed(function.get("parameters") or _NOTHING)
    if strict:
        try:
            check(schema, param=PARAM)
        except BadRequest as error:
            error.args = (f"Of the function {name!r}: {error}",)
            raise
        return Tool(name, schema, lenient=False, strict=True)
    return _best(name, schema)


def _best(name: str, schema: Mapping[str, Any]) -> Tool:
    """As much of a schema that is not strict as can be enforced."""
    try:
        check_size(schema, PARAM)
    except BadRequest:
        return Tool(name, ANY_OBJECT, lenient=True, strict=False)
    for lenient in (False, True):
        if not refusal(schema, lenient=lenient):
            return Tool(name, schema, lenient=lenient, strict=False)
    return Tool(name, ANY_OBJECT, lenient=True, strict=False)


def _closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Arguments are an object, with no members but those named, if any are."""
    given = {"type": "object", **schema}
    if given.get("properties"):
        given.setdefault("additionalProperties", False)
    return given
