"""Items are converted to the messages that chat completions would be sent."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.api.base.signature import seal
from rekindle.api.responses.request import Conversation
from rekindle.api.responses.schema import ResponsesRequest
from tests.api.responses.asking import TOOL, messages_sent, refused, requested

USER: dict[str, Any] = {"role": "user", "content": "hello"}
CALL: dict[str, Any] = {
    "type": "function_call",
    "call_id": "c1",
    "name": "look",
    "arguments": '{"at": "x"}',
}
CALLED: dict[str, Any] = {
    "id": "c1",
    "type": "function",
    "function": {"name": "look", "arguments": '{"at": "x"}'},
}
OUTPUT: dict[str, Any] = {"type": "function_call_output", "call_id": "c1", "output": "seen"}
REASONING: dict[str, Any] = {
    "type": "reasoning",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "Hm."}],
}


def part(text: str, kind: str = "input_text") -> dict[str, Any]:
    return {"type": kind, "text": text}


def said(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [part(text, "output_text")]}


def test_a_string_is_a_users_message() -> None:
    assert requested(input="hello").messages == [USER]
    assert requested(input="").messages == [{"role": "user", "content": ""}]


def test_instructions_are_the_system_message() -> None:
    sent = requested(input="hello", instructions="Be brief.").messages
    assert sent == [{"role": "system", "content": "Be brief."}, USER]


@pytest.mark.parametrize("role", ["user", "system", "developer", "assistant"])
def test_a_text_is_the_same_however_it_is_sent(role: str) -> None:
    kind = "output_text" if role == "assistant" else "input_text"
    for content in ("x", [part("x", kind)], [{**part("x", kind), "prompt_cache_breakpoint": {}}]):
        item = {"role": role, "content": content}
        assert messages_sent(USER, item)[1] == {"role": role, "content": "x"}


def test_several_parts_stay_several() -> None:
    [message] = messages_sent({"role": "user", "content": [part("a"), part("b")]})
    assert message["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


def test_a_reply_is_one_message() -> None:
    assert messages_sent(USER, REASONING, said("Well."), CALL, OUTPUT)[1:] == [
        {
            "role": "assistant",
            "content": "Well.",
            "reasoning_content": "Hm.",
            "tool_calls": [CALLED],
        },
        {"role": "tool", "content": "seen", "tool_call_id": "c1"},
    ]


def test_a_reply_of_calls_alone_has_no_content() -> None:
    other = {**CALL, "call_id": "c2"}
    message = messages_sent(USER, CALL, other, OUTPUT)[1]
    assert message["content"] is None
    assert [call["id"] for call in message["tool_calls"]] == ["c1", "c2"]


def test_replies_one_behind_the_other_stay_two() -> None:
    sent = messages_sent(USER, said("one"), said("two"), REASONING, said("three"))
    assert [message["content"] for message in sent[1:]] == ["one", "two", "three"]
    assert sent[3]["reasoning_content"] == "Hm."


def test_packed_reasoning_is_unpacked_and_that_of_others_left_out() -> None:
    packed = {"type": "reasoning", "summary": [], "encrypted_content": seal("Hm, two.")}
    assert messages_sent(USER, packed, said("2"))[1]["reasoning_content"] == "Hm, two."
    strange = {**packed, "encrypted_content": "gAAAAABo", "summary": [part("x", "summary_text")]}
    assert messages_sent(USER, strange, said("2"))[1] == {"role": "assistant", "content": "2"}


def test_packed_reasoning_cannot_become_more_than_a_request_may_be() -> None:
    bomb = {"type": "reasoning", "encrypted_content": seal("x" * (4 << 20))}
    assert "`input` may expand to at most" in refused(input=[bomb] * 5)


def test_the_input_of_a_custom_tool_is_its_only_argument() -> None:
    call = {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": 'a "b"\nä'}
    output = {"type": "custom_tool_call_output", "call_id": "c1", "output": [part("done")]}
    tools = [{"type": "custom", "name": "patch"}]
    reply, result = messages_sent(USER, call, output, tools=tools)[1:]
    assert reply["tool_calls"][0]["function"] == {
        "name": "patch",
        "arguments": '{"input": "a \\"b\\"\\nä"}',
    }
    assert result == {"role": "tool", "content": "done", "tool_call_id": "c1"}


def test_a_call_has_the_name_by_which_the_model_knows_its_tool() -> None:
    tools = [{"type": "namespace", "name": "crm", "description": "x", "tools": [TOOL]}]
    for call in ({**CALL, "namespace": "crm"}, CALL):
        [_, reply] = messages_sent(USER, call, tools=tools)
        assert reply["tool_calls"][0]["function"]["name"] == "crm__look"


def test_a_system_message_in_mid_conversation_stays_where_it_is() -> None:
    """llama.cpp #27367, ollama #18431, omlx #1826: how it is shown is the template's matter."""
    note = {"role": "developer", "content": [part("It is noon.")]}
    assert [each["role"] for each in messages_sent(USER, said("x"), note, USER)] == [
        *("user", "assistant", "developer", "user")
    ]


def test_assistant_items_without_ids() -> None:
    """codex #12669, vllm #33089."""
    bare = {"role": "assistant", "content": [part("x", "output_text")]}
    assert messages_sent(USER, bare, USER)[1] == {"role": "assistant", "content": "x"}
    full = {**said("x"), "id": "msg_1", "status": "completed", "phase": "final_answer"}
    assert messages_sent(USER, full, USER)[1] == {"role": "assistant", "content": "x"}


def test_refusals_are_text_that_was_said() -> None:
    item = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    assert messages_sent(USER, item)[1]["content"] == "No."


@pytest.mark.parametrize(
    ("item", "about"),
    [
        ({"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}, "file_data"),
        ({"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}, "image_url"),
        ({"role": "user", "content": [{"type": "text"}]}, "item 0: `content` part 0: `text`"),
        ({"role": "tool", "content": "x"}, "item 0: `role`"),
        ({"type": "function_call", "name": "x"}, "item 0: `call_id` is missing"),
        ({"type": "nonsense"}, "item 0: takes items of the types message"),
        ("x", "item 0"),
    ],
)
def test_a_wrong_item_is_named(item: Any, about: str) -> None:
    assert about in refused(input=[item])


ITEMS = st.one_of(
    st.sampled_from([USER, CALL, OUTPUT, REASONING, {"type": "web_search_call", "id": "w"}]),
    st.builds(said, st.text(max_size=5)),
    st.builds(
        lambda role, text: {"role": role, "content": text},
        st.sampled_from(["user", "system", "developer"]),
        st.text(max_size=5),
    ),
)


@given(st.lists(ITEMS, max_size=12))
def test_any_items_become_messages_in_which_nothing_is_lost(items: list[Any]) -> None:
    body = ResponsesRequest.model_validate({"input": items})
    conversation = Conversation.of(body)
    sent = [message.model_dump(exclude_unset=True) for message in conversation.messages]
    kept = [item for item in items if item.get("type") != "web_search_call"]
    assert len(conversation.lines) == len(kept)
    texts = "".join(str(each.get("content") or "") for each in sent)
    for item in kept:
        content = item.get("content")
        text = content if isinstance(content, str) else (content or [{}])[0].get("text", "")
        if item.get("type") != "reasoning":
            assert text in texts
    assert sum(len(each.get("tool_calls", ())) for each in sent) == items.count(CALL)
    again = Conversation.of(ResponsesRequest.model_validate({"input": []}), conversation.lines)
    assert [each.model_dump(exclude_unset=True) for each in again.messages] == sent


@pytest.mark.parametrize("input", [5, {"role": "user"}, True])
def test_a_wrong_input_is_refused_with_the_values_it_takes(input: Any) -> None:
    assert refused(input=input) == "`input` takes a string, or a list of items."
