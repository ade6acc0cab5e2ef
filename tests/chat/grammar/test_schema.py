"""Replies that are constrained by a schema follow it, with any logits."""

from __future__ import annotations

import json
from datetime import date
from typing import Any
from uuid import UUID

import pytest

from rekindle.chat.grammar.schema import check
from rekindle.errors import BadRequest, Unsupported
from rekindle.protocol.requests import StructuredOutput
from tests.chat.grammar.validator import valid
from tests.chat.grammar.writer import Writer, json_grammar, reply_grammars

WRITER = Writer()
SEEDS = range(6)


def closed(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
        **more,
    }


NODE = closed(
    {"value": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}
)
SCHEMAS: dict[str, Any] = {
    "required properties": closed({"b": {"type": "string"}, "a": {"type": "boolean"}}),
    "optional properties": {
        "type": "object",
        "properties": {name: {"type": "boolean"} for name in "cab"},
        "additionalProperties": False,
    },
    "further properties": {
        "type": "object",
        "properties": {"a": {"type": "null"}},
        "additionalProperties": {"type": "integer"},
    },
    "references": {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
    "reference to the whole": closed(
        {"children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}}
    ),
    "anyOf": {"anyOf": [{"type": "integer"}, closed({"a": {"type": "string"}})]},
    "oneOf of different constants": {
        "oneOf": [
            closed({"kind": {"const": "circle"}, "radius": {"type": "number"}}),
            closed({"kind": {"const": "square"}, "side": {"type": "number"}}),
        ]
    },
    "allOf": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"]},
        ]
    },
    "enum": {"enum": ["red", 7, None, {"a": [1]}, "é"]},
    "const": {"const": {"exactly": ["this", 1.5, True]}},
    "list of types": {"type": ["string", "null"]},
    "numbers": closed(
        {
            "age": {"type": "integer", "minimum": 18, "maximum": 99},
            "share": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
            "dozens": {"type": "integer", "multipleOf": 12},
        }
    ),
    "lengths": {"type": "string", "minLength": 3, "maxLength": 8},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "pattern anywhere": {"type": "string", "pattern": "ab+c", "maxLength": 12},
    "arrays": {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 2, "maxItems": 4},
    "nested": closed({"a": closed({"b": closed({"c": {"type": "null"}})})}),
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEMAS)
def test_constrained_replies_follow_the_schema(name: str) -> None:
    schema = SCHEMAS[name]
    check(schema)
    for seed in SEEDS:
        value = WRITER.write_json(schema, seed)
        assert valid(value, schema), value


def test_properties_are_written_in_schema_order() -> None:
    for seed in SEEDS:
        written = WRITER.write_json(SCHEMAS["optional properties"], seed)
        assert list(written) == [name for name in "cab" if name in written]


@pytest.mark.parametrize(
    ("name", "read"),
    [("date", date.fromisoformat), ("uuid", UUID), ("ipv4", str), ("email", str)],
)
def test_known_formats_are_kept_to(name: str, read: Any) -> None:
    schema = {"type": "string", "format": name}
    check(schema)
    grammar = json_grammar(schema, "response_format")
    for seed in SEEDS:
        text = json.loads(WRITER.write(grammar, seed))
        assert read(text)
    assert not WRITER.takes(grammar, '"no"')


def test_no_schema_stands_for_any_object() -> None:
    grammar = reply_grammars("hermes").answer(StructuredOutput(schema=None), opened=False)
    for seed in SEEDS:
        assert isinstance(json.loads(WRITER.write(grammar, seed)), dict)
    assert not WRITER.takes(grammar, "[]")
    assert WRITER.takes(grammar, '{"a": [1, {"b": null}]}')


def test_the_schema_true_stands_for_any_value() -> None:
    grammar = reply_grammars("hermes").answer(StructuredOutput(schema=True), opened=False)
    assert WRITER.takes(grammar, "[1, null]")


def test_white_space_is_bounded() -> None:
    grammar = json_grammar({"type": "object"}, "response_format")
    assert WRITER.takes(grammar, '{"a": 1, "b":[1,2]}')
    for text in (' {"a": 1}', '{ "a": 1}', '{"a":  1}', '{"a": 1 }', '{"a": 1} ', '{\n"a": 1}'):
        assert not WRITER.takes(grammar, text)


REFUSED: dict[str, tuple[Any, str, str]] = {
    "not": ({"type": "object", "properties": {"a": {"not": {}}}}, "`not`", "#/properties/a"),
    "if": ({"if": {}, "then": {}}, "`if`, `then`", "#"),
    "dependentSchemas": ({"type": "object", "dependentSchemas": {}}, "`dependentSchemas`", "#"),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "`uniqueItems`", "#"),
    "contains": (
        {"anyOf": [{"type": "null"}, {"type": "array", "contains": {"type": "null"}}]},
        "`contains`",
        "#/anyOf/1",
    ),
    "unevaluatedProperties": (
        {"type": "object", "unevaluatedProperties": False},
        "`unevaluatedProperties`",
        "#",
    ),
    "propertyNames": ({"type": "object", "propertyNames": {}}, "`propertyNames`", "#"),
    "in a definition": (
        {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/list"}},
            "$defs": {"list": {"type": "array", "uniqueItems": True}},
        },
        "`uniqueItems`",
        "#/$defs/list",
    ),
    "format": (
        {"type": "array", "items": {"type": "string", "format": "iri"}},
        "format 'iri'",
        "#/items",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_keywords_are_refused_by_name_and_place(name: str) -> None:
    schema, named, place = REFUSED[name]
    with pytest.raises(Unsupported) as refused:
        check(schema)
    assert named in str(refused.value)
    assert str(refused.value).endswith(f": {place}.")
    assert refused.value.param == "response_format"


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"$ref": "https://example.com/schema.json"}, "https://example.com/schema.json"),
        ({"$ref": "#/$defs/missing"}, "missing"),
        ({"type": "strin"}, "strin"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf"),
        ({"type": "string", "pattern": "(?=a)b"}, "regular expression"),
        (False, "false"),
    ],
)
def test_a_schema_that_makes_no_sense_is_refused(schema: Any, problem: str) -> None:
    with pytest.raises(BadRequest, match=problem) as refused:
        check(schema)
    assert refused.value.param == "response_format"


def test_the_author_of_a_schema_cannot_turn_enforcement_off() -> None:
    with pytest.raises(Unsupported, match="not"):
        check({"x-guidance": {"lenient": True}, "not": {}})
    grammar = json_grammar(
        {"type": "object", "x-guidance": {"whitespace_flexible": True}}, "response_format"
    )
    assert not WRITER.takes(grammar, "{   }")
