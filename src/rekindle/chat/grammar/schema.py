"""JSON schemas that replies have to follow: enforced completely, or refused with the reason."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher

from rekindle.chat.grammar.lark import styled
from rekindle.chat.grammar.limits import DATA, check_size, children, resolve
from rekindle.errors import BadRequest, Unsupported

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}

_MOST_LOOKS = 300  # at parts of a refused schema, to locate the error
_MOST_CHARACTERS = 300  # of llguidance's message
_KEYS = re.compile(r"Unimplemented keys: \[(.*)\]")
_FORMAT = re.compile(r"Unknown format: (.*)")


def check(schema: Mapping[str, Any] | bool | None, *, param: str = "response_format") -> None:
    """Refuse a schema that cannot be enforced, and name the part that cannot."""
    schema = as_object(schema, param=param)
    check_size(schema, param)
    if problem := refusal(schema):
        raise _error(problem, _place(schema, problem), param)


def as_object(
    schema: Mapping[str, Any] | bool | None, *, param: str = "response_format"
) -> Mapping[str, Any]:
    """The schema as an object; no schema stands for any object."""
    if schema is False:
        raise BadRequest("The schema `false` describes nothing that could be written.", param=param)
    if schema is None:
        return ANY_OBJECT
    return {} if schema is True else schema


def refusal(schema: Mapping[str, Any], *, lenient: bool = False) -> str:
    """Why llguidance cannot compile a schema; empty when it can."""
    grammar = LLMatcher.grammar_from_json_schema(styled(schema, lenient=lenient))
    is_error, problems = LLMatcher.validate_grammar_with_warnings(grammar)
    return problems[0] if is_error else ""


def _error(problem: str, place: str, param: str) -> BadRequest:
    if keys := _KEYS.search(problem):
        named = keys[1].replace('"', "`")
        return Unsupported(f"The schema uses {named}, which is not enforced: {place}.", param=param)
    if name := _FORMAT.search(problem):
        return Unsupported(
            f"The schema uses the format {name[1][:80]!r}, which is not enforced: {place}.",
            param=param,
        )
    first = problem.strip().splitlines()[0][:_MOST_CHARACTERS]
    return BadRequest(f"The schema cannot be enforced: {first}: {place}.", param=param)


def _place(root: Mapping[str, Any], problem: str) -> str:
    """A pointer to the smallest part of the schema that has the same problem."""
    place, schema, seen, looks = "#", root, {id(root)}, _MOST_LOOKS
    while True:
        for way, part in _inner(root, schema):
            looks -= 1
            if id(part) not in seen and refusal(_alone(part, root)) == problem:
                seen.add(id(part))
                place = way if way.startswith("#") else place + way
                schema = part
                break
            if not looks:
                return place
        else:
            return place


def _inner(
    root: Mapping[str, Any], schema: Mapping[str, Any]
) -> list[tuple[str, Mapping[str, Any]]]:
    inner = [("/" + "/".join(way), part) for way, part in children(schema)]
    target = resolve(root, schema.get("$ref"))
    return inner if target is None else [*inner, (schema["$ref"], target)]


def _alone(part: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A part with the definitions that it may refer to."""
    return {**part, **definitions(root)}


def definitions(root: Mapping[str, Any]) -> dict[str, Any]:
    return {key: root[key] for key in ("$defs", "definitions") if key in root}


def relocated(schema: Any, place: str) -> Any:
    """A schema for use inside another one: references to its root become references to `place`."""
    if isinstance(schema, list):
        return [relocated(each, place) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: value if key in DATA else _relocated_value(key, value, place)
        for key, value in schema.items()
    }


def _relocated_value(key: str, value: Any, place: str) -> Any:
    if key == "$ref" and isinstance(value, str) and value.startswith("#"):
        return place + value[1:]
    return relocated(value, place)
