"""A validator of the part of JSON schema that these tests use."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
    "integer": (int,),
    "number": (int, float),
}


def valid(value: Any, schema: Any, root: Any = None) -> bool:
    root = schema if root is None else root
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema:
        target = root
        for step in schema["$ref"].split("/")[1:]:
            target = target[step]
        return valid(value, target, root)
    checks = (_typed, _listed, _combined, _text, _number, _array, _object)
    return all(check(value, schema, root) for check in checks)


def _typed(value: Any, schema: Any, _root: Any) -> bool:
    types = schema.get("type", [])
    named = types if isinstance(types, list) else [types]
    fits = (
        isinstance(value, TYPES[name]) and (name == "boolean" or not isinstance(value, bool))
        for name in named
    )
    return not named or any(fits)


def _listed(value: Any, schema: Any, _root: Any) -> bool:
    return ("const" not in schema or value == schema["const"]) and (
        "enum" not in schema or value in schema["enum"]
    )


def _combined(value: Any, schema: Any, root: Any) -> bool:
    counted = [sum(valid(value, each, root) for each in schema.get("oneOf", [])) == 1]
    return (
        any(valid(value, each, root) for each in schema.get("anyOf", [True]))
        and all(valid(value, each, root) for each in schema.get("allOf", []))
        and ("oneOf" not in schema or all(counted))
    )


def _text(value: Any, schema: Any, _root: Any) -> bool:
    if not isinstance(value, str):
        return True
    length = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
    return length and ("pattern" not in schema or bool(re.search(schema["pattern"], value)))


def _number(value: Any, schema: Any, _root: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return True
    return (
        value >= schema.get("minimum", value)
        and value <= schema.get("maximum", value)
        and ("exclusiveMinimum" not in schema or value > schema["exclusiveMinimum"])
        and ("exclusiveMaximum" not in schema or value < schema["exclusiveMaximum"])
        and ("multipleOf" not in schema or value % schema["multipleOf"] == 0)
    )


def _array(value: Any, schema: Any, root: Any) -> bool:
    if not isinstance(value, list):
        return True
    bounds = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
    return bounds and all(valid(each, schema.get("items", True), root) for each in value)


def _object(value: Any, schema: Any, root: Any) -> bool:
    if not isinstance(value, Mapping):
        return True
    named = schema.get("properties", {})
    other = schema.get("additionalProperties", True)
    return all(name in value for name in schema.get("required", [])) and all(
        valid(each, named.get(name, other), root) for name, each in value.items()
    )
