"""The operations and types of an OpenAPI document, as a page shows them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

Schema = Mapping[str, Any]

LIMITS = {
    "minimum": "from {}",
    "exclusiveMinimum": "above {}",
    "maximum": "up to {}",
    "exclusiveMaximum": "below {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
}


@dataclass(frozen=True, slots=True)
class Field:
    """A parameter of an operation, or a field of an object."""

    name: str
    type: str
    types: list[str]  # those of its types that the page describes
    required: bool
    notes: str


@dataclass(frozen=True, slots=True)
class Operation:
    method: str
    path: str
    text: str
    parameters: list[Field]
    body: str | None  # the name of its type
    answers: list[tuple[str, str, str]]  # status, media types, meaning


@dataclass(frozen=True, slots=True)
class Form:
    """An object; one of several forms where a type has more than one."""

    fields: list[Field]


@dataclass(frozen=True, slots=True)
class Type:
    name: str
    text: str
    forms: list[Form]


class Reference:
    def __init__(self, document: Schema) -> None:
        self._document = document
        self.title: str = document["info"]["title"]
        self.version: str = document["info"]["version"]
        self.summary: str = document["info"].get("summary", "")

    @cached_property
    def sections(self) -> dict[str, list[Operation]]:
        """The operations by their tag."""
        found: dict[str, list[Operation]] = {}
        for path, operations in self._document["paths"].items():
            for method, operation in operations.items():
                tag = (operation.get("tags") or ["other"])[0]
                found.setdefault(tag, []).append(_operation(method.upper(), path, operation))
        return found

    @cached_property
    def types(self) -> list[Type]:
        schemas = self._document.get("components", {}).get("schemas", {})
        return [
            Type(name, schema.get("description", ""), [Form(_fields(form)) for form in forms])
            for name, schema in sorted(schemas.items())
            if (forms := schema.get("oneOf", [schema]))
        ]


def _operation(method: str, path: str, operation: Schema) -> Operation:
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    return Operation(
        method=method,
        path=path,
        text=operation.get("description", ""),
        parameters=[
            _field(each["name"], each.get("schema", {}), required=each.get("required", False))
            for each in operation.get("parameters", ())
        ],
        body=next(_refs(body), None),
        answers=[
            (status, ", ".join(answer.get("content", {})), answer["description"])
            for status, answer in operation["responses"].items()
        ],
    )


def _fields(schema: Schema) -> list[Field]:
    required = schema.get("required", ())
    return [
        _field(name, each, required=name in required)
        for name, each in schema.get("properties", {}).items()
    ]


def _field(name: str, schema: Schema, *, required: bool) -> Field:
    notes = [schema["description"]] if "description" in schema else []
    notes += dict.fromkeys(_limits(schema))
    if schema.get("default") is not None:
        notes.append(f"default {json.dumps(schema['default'])}")
    return Field(name, _type(schema), list(_refs(schema)), required, "; ".join(notes))


def _type(schema: Schema) -> str:
    """A type in words, as a person reads it."""
    if "$ref" in schema:
        return _name(schema["$ref"])
    if "const" in schema or "enum" in schema:
        return " or ".join(json.dumps(each) for each in schema.get("enum", [schema.get("const")]))
    if forms := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(_type(form) for form in forms))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return str(schema.get("type", "any value"))


def _limits(schema: Schema) -> Iterator[str]:
    for key, words in LIMITS.items():
        if key in schema:
            yield words.format(schema[key])
    for form in schema.get("anyOf", ()):
        yield from _limits(form)


def _refs(schema: Schema) -> Iterator[str]:
    """The names of the types that a schema refers to."""
    for key, value in schema.items():
        if key == "$ref":
            yield _name(value)
        elif isinstance(value, dict):
            yield from _refs(value)
        elif isinstance(value, list):
            for each in value:
                yield from _refs(each) if isinstance(each, dict) else ()


def _name(ref: str) -> str:
    return ref.rpartition("/")[2]
