"""`response_format`: which formats reach the runtime, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest

from rekindle.protocol.requests import StructuredOutput
from tests.api.scripted import Front, error

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
JSON = {"type": "json_object"}


def schema(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", **fields}}


@pytest.mark.parametrize(
    ("sent", "structure"),
    [
        (None, None),
        ({"type": "text"}, None),
        (JSON, StructuredOutput(schema=None)),
        ({**JSON, "schema": SCHEMA}, StructuredOutput(schema=SCHEMA)),
        (schema(schema=SCHEMA), StructuredOutput(schema=SCHEMA)),
        (schema(schema=SCHEMA, strict=False, description="x"), StructuredOutput(schema=SCHEMA)),
        (
            {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
            StructuredOutput(schema=SCHEMA),
        ),
        (schema(schema=True), StructuredOutput(schema=True)),
        (schema(), StructuredOutput(schema=None)),
    ],
)
def test_a_form_reaches_the_runtime(sent: Any, structure: StructuredOutput | None) -> None:
    front = Front()
    assert front.chat(response_format=sent).status_code == 200
    assert front.runtime.requested.structured_output == structure


@pytest.mark.parametrize(
    ("sent", "sentence"),
    [
        ("json", "`response_format` takes an object, not a string."),
        ({}, "`response_format.type` is missing."),
        (
            {"type": "xml"},
            "`response_format.type` takes 'text', 'json_object' or 'json_schema'.",
        ),
        (
            {"type": "json_schema"},
            '`response_format` of type "json_schema" needs `json_schema`, an object.',
        ),
        (
            schema(schema="{}"),
            "`response_format.json_schema.schema` takes a JSON schema, which is an object.",
        ),
        (
            schema(strict="yes"),
            "`response_format.json_schema.strict` takes true or false, not a string.",
        ),
    ],
)
def test_an_invalid_format_is_refused_with_the_values_it_takes(sent: Any, sentence: str) -> None:
    front = Front()
    answer = front.chat(response_format=sent)
    assert answer.status_code == 400
    assert error(answer)["message"] == sentence
    assert error(answer)["param"] == "response_format"
    assert front.runtime.requests == []


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_tools_that_may_be_called_go_with_a_form(choice: str | None) -> None:
    front = Front()
    assert front.chat(response_format=JSON, tools=TOOLS, tool_choice=choice).status_code == 200
    ask = front.runtime.requested
    assert (ask.structured_output, ask.tools) == (StructuredOutput(schema=None), TOOLS)


@pytest.mark.parametrize("choice", ["required", TOOLS[0]])
def test_a_tool_that_must_be_called_leaves_no_text_to_have_a_form(choice: Any) -> None:
    fields = {"tools": TOOLS, "tool_choice": choice}
    answer = Front().chat(response_format=JSON, **fields)
    assert answer.status_code == 400
    assert "leave one of them out" in error(answer)["message"]
    assert error(answer)["param"] == "response_format"
    assert Front().chat(response_format={"type": "text"}, **fields).status_code == 200
