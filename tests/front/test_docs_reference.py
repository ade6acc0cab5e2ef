"""The API reference describes types and limits in words."""

from __future__ import annotations

from typing import Any

import pytest

from rekindle.front.docs import DocumentedField, _fields


def field(schema: dict[str, Any], required: bool = False) -> DocumentedField:
    [found] = _fields({"properties": {"x": schema}, "required": ["x"] if required else []})
    return found


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "string"}, "string"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "integer or null"),
        ({"type": "array", "items": {"$ref": "#/components/schemas/Message"}}, "list of Message"),
        ({"enum": ["auto", "none"]}, '"auto" or "none"'),
        ({"const": "text"}, '"text"'),
        ({}, "any value"),
    ],
)
def test_a_type_is_described_in_words(schema: dict[str, Any], words: str) -> None:
    assert field(schema).type == words


def test_a_field_is_described_with_its_limits_and_default() -> None:
    schema = {
        "anyOf": [{"type": "number", "minimum": 0, "maximum": 2}, {"type": "null"}],
        "description": "How bold.",
        "default": 0.7,
    }
    assert field(schema, required=True) == DocumentedField(
        "x", "number or null", [], True, "How bold.; from 0; up to 2; default 0.7"
    )


def test_a_field_names_the_types_it_refers_to() -> None:
    schema = {"anyOf": [{"$ref": "#/components/schemas/A"}, {"items": {"$ref": "#/x/B"}}]}
    assert field(schema).types == ["A", "B"]
