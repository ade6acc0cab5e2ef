"""Messages as clients send them, and what the template reads of them."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from rekindle.api.base.fields import MAX_CHARACTERS, MAX_ITEMS
from rekindle.api.base.messages import Message
from tests.api.scripted import Front, error

USER = {"role": "user", "content": "hello"}
CALL: dict[str, Any] = {
    "id": "c1",
    "type": "function",
    "function": {"name": "add", "arguments": '{"a": 1}'},
}


def seen(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    front = Front()
    answer = front.chat(messages=list(messages))
    assert answer.status_code == 200, answer.text
    assert front.runtime.requested.messages is not None
    return front.runtime.requested.messages


def refusal(message: dict[str, Any]) -> str:
    front = Front()
    answer = front.chat(messages=[message])
    assert answer.status_code == 400
    assert error(answer)["param"] == "messages"
    assert front.runtime.requests == []
    return str(error(answer)["message"])


def test_calls_and_their_results_are_passed_on() -> None:
    messages: list[dict[str, Any]] = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
        {"role": "tool", "content": [{"type": "text", "text": "2"}], "tool_call_id": "c1"},
    ]
    assert seen(*messages) == messages


def test_a_reply_that_only_called_needs_no_content() -> None:
    assert seen(USER, {"role": "assistant", "tool_calls": [CALL]})[1] == {
        "role": "assistant",
        "tool_calls": [CALL],
    }


@pytest.mark.parametrize(
    ("arguments", "passed"), [({"a": 1}, {"a": 1}), ("no JSON", "no JSON"), ("", ""), (None, "{}")]
)
def test_arguments_are_a_string_or_an_object(arguments: Any, passed: Any) -> None:
    call = {"function": {"name": "add", "arguments": arguments}}
    [message] = seen({"role": "assistant", "tool_calls": [call]})
    assert message["tool_calls"] == [{"function": {"name": "add", "arguments": passed}}]


def test_reasoning_is_known_by_two_names() -> None:
    both = {"role": "assistant", "content": "2", "reasoning_content": "Hm."}
    alias = {"role": "assistant", "content": "2", "reasoning": "Hm."}
    assert seen(both, alias, {**both, "reasoning": "other"}) == [both, both, both]


def test_a_reply_dumped_by_openais_client_can_be_sent_back() -> None:
    dumped = {
        "content": None, "refusal": None, "role": "assistant", "annotations": [], "audio": None,
        "function_call": None, "parsed": None, "reasoning_content": "Hm.",
        "tool_calls": [{**CALL, "function": {**CALL["function"], "parsed_arguments": {"a": 1}}}],
    }  # fmt: skip
    assert seen(USER, dumped)[1] == {
        "role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [CALL],
    }  # fmt: skip


def test_litellms_form_of_a_conversation_is_understood() -> None:
    reply = {
        "content": "", "role": "assistant", "function_call": None,
        "provider_specific_fields": None,
        "tool_calls": [{"index": 0, "caller": None, **CALL}],
    }  # fmt: skip
    result = {"tool_call_id": "c1", "role": "tool", "name": "add", "content": "2"}
    assert seen({**USER, "name": None}, reply, result) == [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        result,
    ]


@pytest.mark.parametrize("nothing", [None, []])
def test_empty_tool_calls_of_a_reply_are_dropped(nothing: Any) -> None:
    reply = {"role": "assistant", "content": "Hello"}
    assert seen({**reply, "tool_calls": nothing}) == [reply]


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (
            {"role": "tool", "content": "2"},
            "`messages.0` needs `tool_call_id`, as every tool message does.",
        ),
        (
            {"role": "tool", "content": None, "tool_call_id": "c1"},
            "`messages.0` needs `content`, as every tool message does.",
        ),
        (
            {"role": "assistant", "tool_calls": CALL},
            "`messages.0.tool_calls` takes a list, not an object.",
        ),
        (
            {"role": "assistant", "tool_calls": [{"id": "c1"}]},
            "`messages.0.tool_calls.0.function` is missing.",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]},
            "`messages.0.tool_calls.0.function.name` is missing.",
        ),
        (
            {"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]},
            "`messages.0.tool_calls.0.type` takes 'function'.",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 3}}]},
            "`messages.0.tool_calls.0.function.arguments` takes a string of JSON, or an object.",
        ),
        (
            {"role": "assistant", "content": "x", "reasoning_content": 3},
            "`messages.0.reasoning_content` takes a string, not a number.",
        ),
    ],
)
def test_an_invalid_message_is_refused_with_the_values_it_takes(
    message: dict[str, Any], sentence: str
) -> None:
    assert refusal(message) == sentence


def test_the_result_of_a_function_that_was_not_called_is_refused() -> None:
    message = refusal({"role": "function", "name": "add", "content": "2"})
    assert "role 'function'" in message
    assert "`function_call`" in message


def test_fields_that_no_template_reads_are_dropped() -> None:
    known = {**USER, "name": "Ada"}
    junk = {"junk": [[], []], "refusal": "no", "annotations": [1], "weight": 1, "thinking": {}}
    assert seen({**known, **junk}) == [known]
    assert seen({**USER, "name": {"first": "Ada"}}) == [USER]
    reply = {"role": "assistant", "content": "x", "thinking": "Hm."}
    assert seen(reply) == [reply]


def test_arguments_are_bounded_in_depth() -> None:
    nested: Any = {}
    for _ in range(100):
        nested = {"inside": nested}
    call = {"function": {"name": "f", "arguments": nested}}
    assert "nested at most" in refusal({"role": "assistant", "tool_calls": [call]})


def test_an_empty_field_does_not_hide_the_reasoning_that_another_one_has() -> None:
    message = Message.model_validate(
        {"role": "assistant", "content": "x", "reasoning_content": "", "reasoning": "Hm."}
    )
    assert message.rendered()["reasoning_content"] == "Hm."


PARTS = {"role": "user", "content": [{"type": "text", "text": "x"}] * (MAX_ITEMS // 2)}


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([USER] * (MAX_ITEMS + 1), f"takes at most {MAX_ITEMS} items"),
        ([PARTS, PARTS, {"role": "user", "content": [{"type": "text"}]}], "20001"),
        ([{"role": "assistant", "tool_calls": [CALL] * (MAX_ITEMS + 1)}], "tool calls"),
        ([{"role": "user", "content": "x" * (MAX_CHARACTERS + 1)}], "characters of text"),
    ],
    ids=["messages", "parts", "calls", "text"],
)
def test_too_much_is_refused_before_any_message_is_checked(
    messages: list[dict[str, Any]], sentence: str
) -> None:
    front = Front()
    with patch("rekindle.api.base.messages._refuse_legacy") as check:
        answer = front.chat(messages=messages)
    assert answer.status_code == 400
    assert error(answer)["param"] == "messages"
    assert sentence in error(answer)["message"]
    assert check.call_count == 0
    assert front.runtime.requests == []


def test_as_many_parts_as_may_be_are_taken() -> None:
    assert len(seen(PARTS, PARTS)[0]["content"]) == MAX_ITEMS // 2
