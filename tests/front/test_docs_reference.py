"""The API reference describes types and limits in words."""

from __future__ import annotations

from typing import Any

import pytest

from rekindle.front.docs import DocumentedField, fields_of


def field(schema: dict[str, Any], required: bool = False) -> DocumentedField:
    [found] = fields_of({"properties": {"x": schema}, "required": ["x"] if required else []})
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
    found = field(schema, required=True)
    assert (found.text, found.notes) == ("How bold.", "from 0; up to 2; default 0.7")
    assert found.required


@pytest.mark.parametrize(
    ("schema", "notes"),
    [
        ({"minLength": 1, "maxLength": 256}, "not empty; at most 256 characters"),
        ({"minItems": 1}, "not empty"),
        ({"minimum": 1}, "from 1"),
        ({"exclusiveMinimum": -(1 << 63), "exclusiveMaximum": 1 << 63}, ""),
    ],
)
def test_limits_read_like_a_sentence_and_ranges_of_data_types_are_left_out(
    schema: dict[str, Any], notes: str
) -> None:
    assert field(schema).notes == notes


def test_a_field_names_the_types_it_refers_to() -> None:
    schema = {
        "anyOf": [{"$ref": "#/components/schemas/A"}, {"items": {"$ref": "#/components/schemas/B"}}]
    }
    assert field(schema).types == ["A", "B"]


def test_the_names_of_types_can_be_links() -> None:
    found = field({"type": "array", "items": {"$ref": "#/components/schemas/Message"}})
    assert found.words == ["list of ", "Message", ""]
    assert DocumentedField("x", "string", [], False, "", None, "").words == ["string"]
