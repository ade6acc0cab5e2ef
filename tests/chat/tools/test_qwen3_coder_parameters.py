"""Bare values get the types of their parameters."""

from __future__ import annotations

from typing import Any

import pytest

from rekindle.chat.tools.qwen3_coder import properties, typed


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "integer"}, "3", "3"),
        ({"type": "string"}, "3", '"3"'),
        ({"enum": [1, 2]}, "2", "2"),
        ({"enum": ["1", "2"]}, "2", '"2"'),
        ({"const": True}, "true", "true"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", "null"),
        ({}, "3", '"3"'),
    ],
)
def test_a_bare_value_is_of_the_type_that_its_schema_allows(
    schema: dict[str, Any], text: str, value: str
) -> None:
    assert typed(text, schema) == value


def test_a_parameter_that_is_defined_elsewhere_is_found_there() -> None:
    parameters = {
        "properties": {"n": {"$ref": "#/$defs/Count"}, "lost": {"$ref": "#/$defs/Nothing"}},
        "$defs": {"Count": {"type": "integer"}},
    }
    found = properties({"name": "f", "parameters": parameters})
    assert typed("4", found["n"]) == "4"
    assert typed("4", found["lost"]) == '"4"'
