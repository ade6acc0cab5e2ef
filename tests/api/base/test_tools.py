"""Tools of a request, and the calls and reasoning of a reply."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from rekindle.api.base.tools import MAX_REQUIRED_CALLS
from rekindle.protocol.admin import Validate, Validation
from rekindle.protocol.events import Reason, Started
from rekindle.protocol.requests import GenerateRequest, ToolUse
from tests.api.cache.entries import answering
from tests.api.scripted import (
    Front,
    ScriptedRuntime,
    Step,
    calling,
    chunks,
    delta,
    error,
    finished,
    reasoning,
    reply,
)

SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "default": None}}}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather now.", "parameters": SCHEMA},
}
TIME = {"type": "function", "function": {"name": "get-time.v2"}}
TOOLS = [WEATHER, TIME]
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def requested(**fields: Any) -> GenerateRequest:
    front = Front()
    answer = front.chat(**fields)
    assert answer.status_code == 200, answer.text
    return front.runtime.requested


def allowed(mode: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


# -- requests ------------------------------------------------------------------------------------


def test_tools_reach_the_runtime_as_they_were_sent() -> None:
    request = requested(tools=TOOLS)
    assert request.tools == TOOLS
    assert request.tool_use == ToolUse(choice="auto", parallel=True)


def test_a_null_of_a_tool_says_nothing_and_one_of_its_schema_stays() -> None:
    spoken = {**WEATHER, "function": {**WEATHER["function"], "strict": None, "x": None}}
    assert requested(tools=[spoken]).tools == [WEATHER]


def test_unknown_fields_of_a_function_are_passed_on() -> None:
    function = {"name": "f", "strict": True, "return": {"type": "string"}}
    assert requested(tools=[{"type": "function", "function": function}]).tools == [
        {"type": "function", "function": function}
    ]


def test_no_tools_are_none() -> None:
    assert requested(tools=[]).tools is None


@pytest.mark.parametrize(
    ("choice", "use"),
    [
        (None, ToolUse()),
        ("none", ToolUse(choice="none")),
        ("auto", ToolUse(choice="auto")),
        ("required", ToolUse(choice="required", parallel=False)),
        (NAMED, ToolUse(choice="required", name="get_weather", parallel=False)),
        (allowed("auto", *TOOLS), ToolUse(choice="auto")),
        (allowed("required", *TOOLS), ToolUse(choice="required", parallel=False)),
        (
            allowed("required", NAMED),
            ToolUse(choice="required", name="get_weather", parallel=False),
        ),
    ],
)
def test_each_choice_has_its_word_and_leaves_the_prompt_alone(choice: Any, use: ToolUse) -> None:
    request = requested(tools=TOOLS, tool_choice=choice)
    assert request.tool_use == use
    assert request.tools == TOOLS


def test_tools_that_are_not_allowed_are_not_offered() -> None:
    request = requested(tools=TOOLS, tool_choice=allowed("auto", TIME))
    assert (request.tools, request.tool_use) == ([TIME], ToolUse(choice="auto"))


@pytest.mark.parametrize(("sent", "parallel"), [(None, True), (True, True), (False, False)])
def test_parallel_calls_can_be_refused(sent: bool | None, parallel: bool) -> None:
    assert requested(tools=TOOLS, parallel_tool_calls=sent).tool_use.parallel is parallel


@pytest.mark.parametrize("choice", ["required", allowed("required", *TOOLS), NAMED])
def test_a_reply_that_has_to_call_ends_after_one_call_unless_asked_otherwise(choice: Any) -> None:
    """Nothing else ends it, and small models call again and again."""
    fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice}
    for sent in (None, False):
        assert not requested(**fields, parallel_tool_calls=sent).tool_use.parallel
    several = requested(**fields, parallel_tool_calls=True).tool_use
    assert (several.parallel, several.max_calls) == (True, MAX_REQUIRED_CALLS)


def test_every_choice_of_an_answer_has_the_same_tools() -> None:
    front = Front()
    front.chat(tools=TOOLS, tool_choice="required", n=2)
    assert [request.tools for request in front.runtime.requests] == [TOOLS, TOOLS]
    assert {request.tool_use.choice for request in front.runtime.requests} == {"required"}


def function(**fields: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", **fields}}]


NAME = "takes a name of 1 to 64 letters, digits, dots, dashes and underscores."


@pytest.mark.parametrize(
    ("tools", "sentence"),
    [
        ({}, "`tools` takes a list, not an object."),
        (["f"], "`tools.0` takes an object, not a string."),
        ([{}], "`tools.0.type` is missing."),
        ([{"type": "function"}], "`tools.0.function` is missing."),
        ([{"type": "function", "function": "f"}], "`tools.0.function` takes an object, not a stri"),
        ([{"type": "function", "function": {}}], "`tools.0.function.name` is missing."),
        ([{"type": "web_search"}], "`tools.0.type` takes 'function' or 'custom'."),
        (function(name=""), f"`tools.0.function.name` {NAME}"),
        (function(name="two words"), f"`tools.0.function.name` {NAME}"),
        (function(name="f\n"), f"`tools.0.function.name` {NAME}"),
        (function(name="f" * 65), f"`tools.0.function.name` {NAME}"),
        (function(name=3), f"`tools.0.function.name` {NAME}"),
        (function(description=3), "`tools.0.function.description` takes a string, not a number."),
        (function(parameters=[]), "`tools.0.function.parameters` takes an object, not a list."),
        (function(parameters="{}"), "`tools.0.function.parameters` takes an object, not a string."),
        (function(strict="yes"), "`tools.0.function.strict` takes true or false, not a string."),
        (function() * 2, "`tools` has more than one function called 'f'."),
        (function() * 129, "`tools` takes at most 128 items."),
    ],
)
def test_an_invalid_tool_is_refused_with_the_values_it_takes(tools: Any, sentence: str) -> None:
    front = Front()
    answer = front.chat(tools=tools)
    assert answer.status_code == 400
    assert error(answer)["message"].startswith(sentence)
    assert error(answer)["param"] == "tools"
    assert front.runtime.requests == []


def test_as_many_tools_as_may_be_are_fine() -> None:
    tools = [{"type": "function", "function": {"name": f"f{n}" + "x" * 60}} for n in range(100)]
    assert requested(tools=tools).tools == tools


@pytest.mark.parametrize(
    "choice",
    [
        "any",
        3,
        ["auto"],
        {"type": "function"},
        {"type": "function", "name": "get_weather"},
        {"type": "custom"},
        {"type": "allowed_tools"},
        allowed("none", NAMED),
        allowed("auto"),
    ],
)
def test_a_choice_has_one_sentence_for_all_it_may_be(choice: Any) -> None:
    found = error(Front().chat(tools=TOOLS, tool_choice=choice))
    assert found["message"].startswith('`tool_choice` takes "none", "auto", "required", {"type"')
    assert found["param"] == "tool_choice"


OTHER = {"type": "function", "function": {"name": "get_news"}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"tool_choice": "required"}, "needs `tools`"),
        ({"tool_choice": "required", "tools": []}, "needs `tools`"),
        ({"tool_choice": NAMED}, "'get_weather', which is not among `tools`"),
        ({"tool_choice": OTHER, "tools": TOOLS}, "'get_news', which is not among `tools`"),
        ({"tool_choice": allowed("auto", NAMED, OTHER), "tools": TOOLS}, "'get_news'"),
    ],
)
def test_a_choice_among_tools_that_are_not_there_is_refused(
    fields: dict[str, Any], expected: str
) -> None:
    answer = Front().chat(**fields)
    assert answer.status_code == 400
    assert expected in error(answer)["message"]
    assert error(answer)["param"] == "tool_choice"


VALID = Validation(status="hit", reusable_tokens=1, invalidated_at=None, reason=Reason.FULL_MATCH)


def test_a_cache_key_is_validated_with_the_same_tools() -> None:
    body = {"cache_key": "k", "messages": [{"role": "user", "content": "x"}]}
    front = Front(ScriptedRuntime(answers=answering(VALID)))
    assert front.post("/v1/cache/validate", {**body, "tools": TOOLS}).status_code == 200
    assert isinstance(front.runtime.admin_request.op, Validate)
    assert front.runtime.admin_request.op.tools == TOOLS
    bad = front.post("/v1/cache/validate", {**body, "tools": [{"type": "web_search"}]})
    assert error(bad)["message"] == "`tools.0.type` takes 'function' or 'custom'."
    assert len(front.runtime.admin_requests) == 1


# -- answers -------------------------------------------------------------------------------------


PARIS = ("get_weather", '{"city": "Paris"}')
ROME = ("get_weather", '{"city": "Rome"}')


def test_a_reply_that_only_calls_has_no_content() -> None:
    body = Front(ScriptedRuntime(calling(PARIS, ROME))).chat(tools=TOOLS).json()
    ChatCompletion.model_validate(body)
    [choice] = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [
            {"id": "call_0", "type": "function",
             "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}},
            {"id": "call_1", "type": "function",
             "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}},
        ],
    }  # fmt: skip


def test_text_before_a_call_is_content() -> None:
    runtime = ScriptedRuntime(calling(PARIS, before=[delta("Let me "), delta("look.")]))
    message = Front(runtime).chat(tools=TOOLS).json()["choices"][0]["message"]
    assert message["content"] == "Let me look."
    assert len(message["tool_calls"]) == 1


def test_a_stream_of_calls_has_openais_shape() -> None:
    answer = Front(ScriptedRuntime(calling(PARIS, ROME))).chat(tools=TOOLS, stream=True)
    found = chunks(answer)
    for chunk in found:
        ChatCompletionChunk.model_validate(chunk)
    deltas = [chunk["choices"][0]["delta"] for chunk in found]
    assert deltas[0] == {"role": "assistant", "content": None, "refusal": None}
    assert deltas[1] == {
        "tool_calls": [
            {"index": 0, "id": "call_0", "type": "function",
             "function": {"name": "get_weather", "arguments": ""}}
        ]
    }  # fmt: skip
    assert deltas[2] == {"tool_calls": [{"index": 0, "function": {"arguments": '{"cit'}}]}
    assert [d["tool_calls"][0]["index"] for d in deltas[1:-1]] == [0] * 5 + [1] * 5
    assert deltas[-1] == {}
    assert found[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_stream_that_speaks_before_it_calls_opens_with_text() -> None:
    runtime = ScriptedRuntime(calling(PARIS, before=[delta("Let me look.")]))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks(Front(runtime).chat(stream=True))]
    assert deltas[0] == {"role": "assistant", "content": "", "refusal": None}
    assert deltas[1] == {"content": "Let me look."}


THINKING: list[Step] = [
    Started(0, 10, 0),
    reasoning("Hm, "),
    reasoning("two."),
    delta("2"),
    finished(completion_tokens=9, reasoning_tokens=7),
]


def test_reasoning_has_a_field_of_its_own() -> None:
    body = Front(ScriptedRuntime(THINKING)).chat().json()
    message = body["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("2", "Hm, two.")
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 7}


def test_reasoning_is_streamed_as_it_comes() -> None:
    answer = Front(ScriptedRuntime(THINKING)).chat(
        stream=True, stream_options={"include_usage": True}
    )
    *parts, usage = chunks(answer)
    assert [part["choices"][0]["delta"] for part in parts] == [
        {"role": "assistant", "content": "", "refusal": None},
        {"reasoning_content": "Hm, "},
        {"reasoning_content": "two."},
        {"content": "2"},
        {},
    ]
    assert usage["usage"]["completion_tokens_details"] == {"reasoning_tokens": 7}


def test_a_reply_cut_in_its_thoughts_has_empty_content() -> None:
    script: list[Step] = [reasoning("Hm"), finished("length", reasoning_tokens=1)]
    message = Front(ScriptedRuntime(script)).chat().json()["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("", "Hm")


def test_a_plain_reply_says_nothing_of_calls_and_thoughts() -> None:
    message = Front().chat(tools=TOOLS).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Hello", "refusal": None}


def test_choices_call_each_for_itself() -> None:
    runtime = ScriptedRuntime(calling(PARIS), reply("No."))
    calls, says = Front(runtime).chat(tools=TOOLS, n=2).json()["choices"]
    assert calls["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    assert says["message"]["content"] == "No."
    assert "tool_calls" not in says["message"]


def test_each_choice_of_a_stream_begins_with_its_role() -> None:
    """A reply that only calls has no content, whichever choice it is."""
    runtime = ScriptedRuntime(reply("Hi"), calling(("get_weather", "{}")))
    found = chunks(Front(runtime).chat(tools=TOOLS, n=2, stream=True))
    first: dict[int, Any] = {}
    for choice in (choice for chunk in found for choice in chunk["choices"]):
        first.setdefault(choice["index"], choice["delta"])
    assert first == {
        0: {"role": "assistant", "content": "", "refusal": None},
        1: {"role": "assistant", "content": None, "refusal": None},
    }
