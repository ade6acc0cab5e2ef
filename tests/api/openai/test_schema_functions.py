"""OpenAI's older form of tools, `functions` and `function_call`, which some clients still send."""

from __future__ import annotations

from typing import Any

import pytest

from rekindle.protocol.requests import GenerateRequest, ToolUse
from tests.api.scripted import Front, ScriptedRuntime, calling, chunks, error

ADD = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TOOL = {"type": "function", "function": ADD}
USER = {"role": "user", "content": "1 + 2?"}
CALL = {"name": "add", "arguments": '{"a": 1}'}
HISTORY: list[dict[str, Any]] = [
    USER,
    {"role": "assistant", "content": None, "function_call": CALL},
    {"role": "function", "name": "add", "content": "3"},
]


def requested(**fields: Any) -> GenerateRequest:
    front = Front()
    answer = front.chat(**fields)
    assert answer.status_code == 200, answer.text
    return front.runtime.requested


def caller() -> Front:
    return Front(ScriptedRuntime(calling(("add", '{"a": 1}'))))


def test_functions_are_the_same_as_tools() -> None:
    """The prompt is the same, so that state is reused whatever form a client sends."""
    old = requested(functions=[ADD])
    new = requested(tools=[TOOL], parallel_tool_calls=False)
    assert (old.tools, old.tool_use, old.messages) == (new.tools, new.tool_use, new.messages)


@pytest.mark.parametrize(
    ("choice", "use"),
    [
        (None, ToolUse(parallel=False)),
        ("auto", ToolUse(parallel=False)),
        ("none", ToolUse(choice="none", parallel=False)),
        ({"name": "add"}, ToolUse(choice="required", name="add", parallel=False)),
    ],
)
def test_a_choice_is_the_same_as_a_choice_of_tools(choice: Any, use: ToolUse) -> None:
    assert requested(functions=[ADD], function_call=choice).tool_use == use


def test_earlier_calls_and_results_become_those_of_tools() -> None:
    messages = requested(functions=[ADD], messages=HISTORY).messages
    assert messages is not None
    _, call, result = messages
    assert "function_call" not in call
    [made] = call["tool_calls"]
    assert made["function"] == CALL
    assert (result["role"], result["tool_call_id"]) == ("tool", made["id"])
    assert result["content"] == "3"


def test_a_whole_answer_has_the_call_in_the_older_form() -> None:
    [choice] = caller().chat(functions=[ADD]).json()["choices"]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"] == CALL
    assert "tool_calls" not in choice["message"]


def test_a_stream_has_the_call_in_the_older_form() -> None:
    found = [each["choices"][0] for each in chunks(caller().chat(functions=[ADD], stream=True))]
    parts = [each["delta"]["function_call"] for each in found if "function_call" in each["delta"]]
    assert parts[0] == {"name": "add", "arguments": ""}
    assert "".join(part["arguments"] for part in parts) == CALL["arguments"]
    assert found[-1]["finish_reason"] == "function_call"
    assert not any("tool_calls" in each["delta"] for each in found)


def test_tools_are_answered_in_the_newer_form() -> None:
    [choice] = caller().chat(tools=[TOOL]).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert "function_call" not in choice["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": [ADD], "tools": [{**TOOL, "function": {"name": "b"}}]}, "functions"),
        ({"functions": [ADD, ADD]}, "functions"),
        ({"functions": [{"description": "no name"}]}, "functions"),
        ({"functions": [ADD], "function_call": "required"}, "function_call"),
        ({"functions": [ADD], "function_call": {"name": "other"}}, "tool_choice"),
        ({"messages": [USER, {"role": "function", "name": "f", "content": "x"}]}, "messages"),
    ],
)
def test_what_makes_no_sense_is_refused(fields: dict[str, Any], param: str) -> None:
    assert error(Front().chat(**fields))["param"] == param
