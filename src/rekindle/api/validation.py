"""A validation error as one sentence that names the field and what it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from rekindle.errors import BadRequest

TAKES = {
    "float_type": "a number",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "literal_error": "{expected}",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "a number from {ge} up",
    "less_than": "a number below {lt}",
    "less_than_equal": "a number up to {le}",
    "too_long": "at most {max_length} items",
    "too_short": "at least {min_length} item",
    "string_too_long": "at most {max_length} characters",
    "string_too_short": "at least {min_length} character",
}
SOURCES = ("body", "query")  # where FastAPI found the value
WRONG_TYPE = {name for name in TAKES if name.endswith("_type")}
JSON_NAMES = {
    dict: "an object",
    list: "a list",
    str: "a string",
    bool: "a boolean",
    int: "a number",
    float: "a decimal number",
    type(None): "null",
}


def explain(errors: Sequence[Mapping[str, Any]]) -> BadRequest:
    """The first of pydantic's errors; the field's path is spelled as the client wrote it."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return BadRequest(f"The body is not valid JSON: {first['ctx']['error']}.")
    path = [str(part) for part in first["loc"]]
    if path and path[0] in SOURCES:
        del path[0]
    where = f"`{'.'.join(path)}`" if path else "The body"
    return BadRequest(f"{where} {fault(first)}.", param=path[0] if path else None)


def fault(error: Mapping[str, Any]) -> str:
    """What is wrong with a field, behind its name."""
    kind = error["type"]
    context = error.get("ctx", {})
    if kind == "missing":
        return "is missing"
    if kind == "value_error":
        return str(context["error"])
    if kind not in TAKES:
        return str(error["msg"])
    takes = "takes " + TAKES[kind].format_map({name: _plain(context[name]) for name in context})
    if kind in WRONG_TYPE and (name := JSON_NAMES.get(type(error["input"]))):
        return f"{takes}, not {name}"
    return takes


def fault_among(error: ValidationError, what: str, otherwise: str) -> str:
    """One sentence about the first item of a list that is wrong, called `what`, or `otherwise`."""
    for each in error.errors():
        match each["loc"]:
            case (_, int() as place, *field) if field:
                return f"{what} {place}: `{field[-1]}` {fault(each)}"
            case (_, int() as place):
                return f"{what} {place}: {fault(each)}"
    return otherwise


def _plain(value: Any) -> Any:
    """0.0 as 0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
