"""Custom tools of OpenAI's chat: the model calls them with free text instead of JSON."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from rekindle.protocol.requests import GenerateRequest, ToolUse
from tests.api.live import Live
from tests.api.responses.asking import HELLO as RESPONSES_HELLO
from tests.api.scripted import Front, ScriptedRuntime, calling, chunks, error

REGEX = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[a-z]+"}}
LARK = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "a"'}}
LONG = {"syntax": "regex", "definition": "a" * 70_000}
FUNCTION = {"type": "function", "function": {"name": "add"}}
CODE = 'print("hi")\n'
CALLED = {"type": "custom", "custom": {"name": "run", "input": CODE}}
ARGUMENTS = json.dumps({"input": CODE})


def tool(form: dict[str, Any] | None = None) -> dict[str, Any]:
    custom = {"name": "run", "description": "Runs code.", **({"format": form} if form else {})}
    return {"type": "custom", "custom": custom}


def requested(**fields: Any) -> GenerateRequest:
    front = Front()
    answer = front.chat(**fields)
    assert answer.status_code == 200, answer.text
    return front.runtime.requested


def caller(*calls: tuple[str, str]) -> Front:
    return Front(ScriptedRuntime(calling(*calls or [("run", ARGUMENTS)])))


@pytest.mark.parametrize("form", [None, {"type": "text"}, REGEX, LARK])
def test_the_prompt_is_that_of_a_custom_tool_in_responses(form: Any) -> None:
    """A conversation can switch between the two APIs, and its state is reused."""
    in_chat = requested(tools=[tool(form)]).tools
    front = Front()
    flat = tool()["custom"]
    if form:
        flat["format"] = {"type": form["type"], **form.get("grammar", {})}
    body = {**RESPONSES_HELLO, "tools": [{"type": "custom", **flat}], "store": False}
    assert front.post("/v1/responses", body).status_code == 200
    assert in_chat == front.runtime.requested.tools


def test_a_regex_is_enforced_and_a_lark_grammar_is_described() -> None:
    [regex] = requested(tools=[tool(REGEX)]).tools or []
    assert regex["function"]["strict"]
    front = Front()
    answer = front.chat(tools=[tool(LARK), FUNCTION])
    [lark, _] = front.runtime.requested.tools or []
    assert 'start: "a"' in lark["function"]["description"]
    assert answer.headers["x-unenforced-grammars"] == "run"


@pytest.mark.parametrize(
    ("choice", "use"),
    [
        (CALLED["type"], None),
        ({"type": "custom", "custom": {"name": "run"}}, ToolUse(choice="required", name="run")),
    ],
)
def test_a_custom_tool_can_be_chosen(choice: Any, use: ToolUse | None) -> None:
    if use is None:
        assert error(Front().chat(tools=[tool()], tool_choice=choice))["param"] == "tool_choice"
        return
    found = requested(tools=[tool(), FUNCTION], tool_choice=choice).tool_use
    assert (found.choice, found.name) == (use.choice, use.name)


def test_custom_tools_can_be_among_the_allowed_ones() -> None:
    allowed = {"mode": "auto", "tools": [{"type": "custom", "custom": {"name": "run"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    [shown] = requested(tools=[tool(), FUNCTION], tool_choice=choice).tools or []
    assert shown["function"]["name"] == "run"


def test_a_whole_answer_has_the_text_of_a_custom_call() -> None:
    front = caller(("run", ARGUMENTS), ("add", '{"a": 1}'))
    [choice] = front.chat(tools=[tool(), FUNCTION]).json()["choices"]
    custom, function = choice["message"]["tool_calls"]
    assert custom == {"id": "call_0", **CALLED}
    assert (function["type"], function["function"]["arguments"]) == ("function", '{"a": 1}')
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("arguments", "text"), [(ARGUMENTS, CODE), ("no JSON", "no JSON"), ('{"input": "cut', "cut")]
)
def test_a_stream_has_the_text_in_pieces(arguments: str, text: str) -> None:
    front = caller(("run", arguments), ("add", '{"a": 1}'))
    found = chunks(front.chat(tools=[tool(), FUNCTION], stream=True))
    deltas = [each["choices"][0]["delta"].get("tool_calls", []) for each in found]
    calls = [call for each in deltas for call in each]
    first, *_ = custom = [call for call in calls if call["index"] == 0]
    begun = {"type": "custom", "custom": {"name": "run", "input": ""}}
    assert first == {"index": 0, "id": "call_0", **begun}
    assert "".join(call["custom"]["input"] for call in custom) == text
    assert not any(call.get("custom", {}).get("input") == "" for call in custom[1:])
    function = [call["function"] for call in calls if call["index"] == 1]
    assert "".join(each["arguments"] for each in function) == '{"a": 1}'
    assert found[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_an_earlier_call_is_shown_to_the_model_as_it_wrote_it() -> None:
    messages = [
        {"role": "user", "content": "Run it."},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "call_0", **CALLED}]},
        {"role": "tool", "tool_call_id": "call_0", "content": "hi"},
    ]
    _, call, _ = requested(tools=[tool()], messages=messages).messages or []
    [made] = call["tool_calls"]
    assert made == {
        "id": "call_0",
        "type": "function",
        "function": {"name": "run", "arguments": ARGUMENTS},
    }


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [{"type": "custom"}]}, "`tools.0.custom` is missing."),
        ({"tools": [{"type": "custom", "custom": {}}]}, "`tools.0.custom.name` is missing."),
        ({"tools": [tool(), tool()]}, "`tools` has more than one function called 'run'."),
        (
            {"tools": [tool({"type": "grammar"})]},
            '`tools.0.custom.format` takes a `grammar` if its type is "grammar", and only then.',
        ),
        (
            {"tools": [tool({"type": "grammar", "grammar": LONG})]},
            "`tools.0.custom.format.grammar.definition` takes at most 65536 characters.",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(fields: dict[str, Any], message: str) -> None:
    assert error(Front().chat(**fields))["message"] == message


def test_openais_client_reads_custom_calls() -> None:
    live = Live(caller())
    live.start()
    try:
        with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
            made = client.chat.completions.create(
                model="default",
                messages=[{"role": "user", "content": "Run it."}],
                tools=[{"type": "custom", "custom": {"name": "run"}}],
            )
    finally:
        live.stop()
    [call] = made.choices[0].message.tool_calls or []
    assert call.type == "custom"
    assert (call.custom.name, call.custom.input) == ("run", CODE)
