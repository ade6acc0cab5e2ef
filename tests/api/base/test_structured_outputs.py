"""vLLM's and llama.cpp's constraints: which reach the runtime, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest

from rekindle.protocol.requests import StructuredOutput
from tests.api.scripted import Front, error

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
GRAMMAR = 'root ::= "yes" | "no"'
ONE_OF = (
    "`structured_outputs` takes an object with one of `json`, `regex`, `choice`, `grammar` and "
    "`json_object`"
)


@pytest.mark.parametrize(
    ("field", "value", "structure"),
    [
        ("grammar", GRAMMAR, {"grammar": GRAMMAR}),
        ("json_schema", SCHEMA, {"schema": SCHEMA}),
        ("json_schema", {}, {"schema": {}}),
        ("guided_json", SCHEMA, {"schema": SCHEMA}),
        ("guided_json", '{"type": "integer"}', {"schema": {"type": "integer"}}),
        ("guided_json", f'{{"const": {10**30}}}', {"schema": {"const": 1e30}}),  # as in a body
        ("guided_regex", "[0-9]+", {"regex": "[0-9]+"}),
        ("guided_choice", ["yes", "no"], {"choices": ["yes", "no"]}),
        ("guided_grammar", GRAMMAR, {"grammar": GRAMMAR}),
        ("structured_outputs", {"json": SCHEMA}, {"schema": SCHEMA}),
        ("structured_outputs", {"json": '{"type": "integer"}'}, {"schema": {"type": "integer"}}),
        ("structured_outputs", {"json_object": True}, {"schema": None}),
        ("structured_outputs", {"regex": "a+", "json": None}, {"regex": "a+"}),
        ("structured_outputs", {"choice": ["a"], "disable_fallback": True}, {"choices": ["a"]}),
        ("structured_outputs", {"grammar": GRAMMAR, "json_object": False}, {"grammar": GRAMMAR}),
        ("response_format", {"type": "json_object"}, {"schema": None}),
    ],
)
def test_the_reply_format_reaches_the_runtime(
    field: str, value: Any, structure: dict[str, Any]
) -> None:
    front = Front()
    assert front.chat(**{field: value}).is_success
    assert front.complete(**{field: value}).is_success
    expected = StructuredOutput(**structure, param=field)
    asked = [request.structured_output for request in front.runtime.requests]
    assert asked == [expected, expected]


@pytest.mark.parametrize(
    ("field", "value"),
    [("grammar", ""), ("grammar_lazy", False), ("grammar_triggers", []), ("guided_json", None)],
)
def test_an_empty_field_asks_for_nothing(field: str, value: Any) -> None:
    front = Front()
    assert front.chat(**{field: value}).is_success
    assert front.runtime.requested.structured_output is None


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("grammar", 3, "`grammar` takes a string, not a number."),
        ("grammar", "x" * 65_537, "`grammar` takes at most 65536 characters."),
        ("json_schema", "{}", "`json_schema` takes a JSON schema, which is an object."),
        ("guided_json", "{", "`guided_json` takes a JSON schema, which is an object."),
        ("guided_json", '{"const": NaN}', "`guided_json` takes a JSON schema, which is an object."),
        (
            "guided_json",
            r'{"const": "\ud800"}',
            "`guided_json` takes a JSON schema, which is an object.",
        ),
        ("guided_json", "[" * 100_000, "`guided_json` takes a JSON schema, which is an object."),
        ("guided_regex", "", "`guided_regex` takes at least 1 character."),
        ("guided_regex", "a" * 16_385, "`guided_regex` takes at most 16384 characters."),
        ("guided_choice", "yes", "`guided_choice` takes a list, not a string."),
        ("guided_choice", [], "`guided_choice` takes at least 1 item."),
        ("guided_choice", ["a", 1], "`guided_choice.1` takes a string, not a number."),
        ("guided_choice", ["a"] * 1_001, "`guided_choice` takes at most 1000 items."),
        ("guided_choice", ["a" * 70_000], "`guided_choice` takes at most 65536 characters in all."),
        ("structured_outputs", "json", "`structured_outputs` takes an object, not a string."),
        ("structured_outputs", {}, f"{ONE_OF}."),
        ("structured_outputs", {"json_object": False}, f"{ONE_OF}."),
        ("structured_outputs", {"structural_tag": "{}"}, f"{ONE_OF}, not `structural_tag`"),
        ("structured_outputs", {"regex": "a", "xml": 1}, f"{ONE_OF}, not `xml`"),
        (
            "structured_outputs",
            {"choice": [1]},
            "`structured_outputs.choice.0` takes a string, not a number.",
        ),
        (
            "guided_whitespace_pattern",
            " ?",
            "a whitespace pattern for JSON is not supported: remove `guided_whitespace_pattern`",
        ),
        (
            "grammar_lazy",
            True,
            "a grammar that waits for a trigger is not supported: remove `grammar_lazy`",
        ),
    ],
)
def test_wrong_and_unsupported_constraints_are_refused(
    field: str, value: Any, sentence: str
) -> None:
    front = Front()
    for ask in (front.chat, front.complete):
        answer = ask(**{field: value})
        assert answer.status_code == 400
        assert error(answer)["message"] == sentence
        assert error(answer)["param"] == field
    assert front.runtime.requests == []


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"grammar": GRAMMAR, "guided_regex": "a"}, "`grammar` and `guided_regex`"),
        (
            {"guided_json": {}, "response_format": {"type": "json_object"}},
            "`guided_json` and `response_format`",
        ),
        (
            {"structured_outputs": {"json": {}, "regex": "a"}},
            "`structured_outputs.json` and `structured_outputs.regex`",
        ),
        (
            {"json_schema": {}, "structured_outputs": {"json_object": True}},
            "`json_schema` and `structured_outputs.json_object`",
        ),
    ],
)
def test_two_constraints_are_refused_by_name(fields: Any, named: str) -> None:
    for ask in (Front().chat, Front().complete):
        answer = ask(**fields)
        assert answer.status_code == 400
        assert named in error(answer)["message"]


def test_a_tool_that_must_be_called_leaves_no_text_to_be_held_to_anything() -> None:
    answer = Front().chat(guided_regex="a", tools=TOOLS, tool_choice="required")
    assert answer.status_code == 400
    assert error(answer)["param"] == "guided_regex"
