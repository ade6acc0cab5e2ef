"""A schema that is too costly is refused before it is compiled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rekindle.chat.grammar.schema import LIMITS, check
from rekindle.errors import BadRequest
from tests.chat.grammar.writer import Writer, json_grammar

WRITER = Writer()


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def names(count: int) -> dict[str, Any]:
    return {f"p{number}": {"type": "string"} for number in range(count)}


def doubled(way: str, levels: int) -> dict[str, Any]:
    """Each definition names the one before it twice."""
    found: dict[str, Any] = {"d0": {"type": "string", "pattern": "a.*b"}}
    for level in range(1, levels):
        found[f"d{level}"] = {way: [{"$ref": f"#/$defs/d{level - 1}"}] * 2}
    return {"$defs": found, "$ref": f"#/$defs/d{levels - 1}"}


COSTLY: dict[str, Any] = {
    "10,000 properties": {"type": "object", "properties": names(10_000)},
    "100,000 values": {"enum": list(range(100_000))},
    "1,000 levels": nested(1_000),
    "a huge multiple": {"type": "integer", "multipleOf": 99_999_989},
    "a fine multiple": {"type": "number", "multipleOf": 99999.989},
    "multiples of multiples": {
        "allOf": [{"type": "integer", "multipleOf": prime} for prime in (997, 991)]
    },
    "many patterns at once": {
        "allOf": [{"type": "string", "pattern": f".*a.{{{n}}}b.*"} for n in range(20)]
    },
    "many patterns below": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "string", "pattern": f".*a.{{{n}}}b"}}}
            for n in range(20)
        ]
    },
    "alternatives of alternatives": {
        "allOf": [
            {"anyOf": [{"type": "object", "required": [f"{a}{b}"]} for b in range(10)]}
            for a in range(4)
        ]
    },
    "references that double": doubled("allOf", 30),
    "alternatives that double": doubled("anyOf", 30),
}


@pytest.mark.parametrize("name", COSTLY)
def test_a_costly_schema_is_refused(name: str) -> None:
    with pytest.raises(BadRequest) as refused:
        check(COSTLY[name])
    assert refused.value.param == "response_format"
    assert len(str(refused.value)) < 300


WORTH_IT: dict[str, Any] = {
    "nested quantifiers": {"type": "string", "pattern": "(a+)+$"},
    "a billion items": {"type": "array", "items": {"type": "null"}, "minItems": 10**9},
    "a long text": {"type": "string", "minLength": 10**9},
    "a long constant": {"const": "x" * 200_000},
    "an exponential automaton": {"type": "string", "pattern": "^(a|b)*a(a|b){40}$"},
    "many properties": {"type": "object", "properties": names(300)},
    "40 levels": nested(40),
    "large enum": {"enum": [f"value {number}" for number in range(5_000)]},
    "a definition of itself": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
}


@pytest.mark.parametrize("name", WORTH_IT)
def test_a_large_schema_works_or_ends_the_reply(name: str) -> None:
    check(WORTH_IT[name])
    constraint = WRITER.matcher(json_grammar(WORTH_IT[name], "response_format"))
    chance = np.random.default_rng(0)
    for _ in range(50):
        row = chance.standard_normal(WRITER.vocabulary.size).astype(np.float32)
        constraint.mask(row)
        assert np.isfinite(row).any()
        constraint.accept(int(row.argmax()))
        if constraint.done:
            break


def test_ordinary_combinations_are_not_refused() -> None:
    check(
        {
            "type": "object",
            "properties": {
                f"p{number}": {"type": "string", "format": "date", "description": "x"}
                for number in range(40)
            },
            "anyOf": [{"required": ["p1"]}, {"required": ["p2"]}],
        }
    )
    shapes = [
        {"type": "object", "properties": {"kind": {"const": f"k{n}"}, "of": {"$ref": "#/$defs/s"}}}
        for n in range(40)
    ]
    check({"$defs": {"s": {"anyOf": [*shapes, {"type": "null"}]}}, "$ref": "#/$defs/s"})


@pytest.mark.parametrize("way", ["one", "many", "named"])
def test_patterns_have_a_size_in_all(way: str) -> None:
    half = "a" * (LIMITS.pattern_characters // 2)
    patterns = {"one": [half + half + "a"], "many": [half, half + "a"], "named": [half]}[way]
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {f"p{n}": {"type": "string", "pattern": p} for n, p in enumerate(patterns)},
    }
    if way == "named":
        schema["patternProperties"] = {half + "b": {"type": "string"}}
    with pytest.raises(BadRequest, match="characters in all"):
        check(schema)
