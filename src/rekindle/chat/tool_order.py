"""Tool definitions in one order, whoever sends them: a set of tools is one prompt, not many."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

# What comes first, in this order; the rest follows by its name.
TOOL = ("type", "function")
FUNCTION = ("name", "description", "parameters")
SCHEMA = ("type", "title", "description", "properties", "items", "enum", "required")
SCHEMAS_BY_NAME = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)
SCHEMAS = frozenset(
    {"items", "prefixItems", "additionalProperties", "anyOf", "allOf", "oneOf", "not", "contains"}
    | {"if", "then", "else", "propertyNames", "unevaluatedItems", "unevaluatedProperties"}
)


def ordered(tools: Sequence[Any]) -> list[Any]:
    """The tools by their names, and what is said of each in a fixed order.

    Properties stay as their author has them: models fill arguments in that order, so it is part of
    what was meant.
    """
    return sorted(map(_tool, tools), key=_rank)


def described(tools: Sequence[Any] | None) -> list[Any] | None:
    """The tools as the model is told of them: how strictly they are enforced is not for it."""
    return [_without_strictness(tool) for tool in tools] if tools else None


def _without_strictness(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or "strict" not in function:
        return tool
    kept = {name: value for name, value in function.items() if name != "strict"}
    return {**tool, "function": kept}


def differ(one: Any, other: Any) -> bool:
    """Whether two values are written differently; to Python, order makes no difference."""
    return json.dumps(one) != json.dumps(other)


def _rank(tool: Any) -> tuple[str, str]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return str(name or ""), json.dumps(tool)


def _tool(tool: Any) -> Any:
    if not isinstance(tool, Mapping):
        return tool
    told = _by(tool, TOOL)
    if isinstance(function := told.get("function"), Mapping):
        function = _by(function, FUNCTION)
        if "parameters" in function:
            function["parameters"] = _schema(function["parameters"])
        told["function"] = function
    return told


def _schema(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_schema(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {keyword: _below(keyword, value) for keyword, value in _by(schema, SCHEMA).items()}


def _below(keyword: str, value: Any) -> Any:
    if keyword in SCHEMAS_BY_NAME and isinstance(value, Mapping):
        return {name: _schema(each) for name, each in value.items()}
    return _schema(value) if keyword in SCHEMAS else value


def _by(told: Mapping[str, Any], first: Sequence[str]) -> dict[str, Any]:
    names = [*(name for name in first if name in told), *sorted(told.keys() - set(first))]
    return {name: told[name] for name in names}
