"""Messages in Anthropic's form are converted to those that templates read."""

from __future__ import annotations

from typing import Any

import pytest

from rekindle.api.base.fields import MAX_CHARACTERS, MAX_ITEMS
from rekindle.api.base.signature import seal, sign
from tests.api.anthropic.asking import LOOK, TOOL, messages_sent, refused, requested

USER = {"role": "user", "content": "hello"}
MARK = {"type": "ephemeral"}


def text(words: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **fields}


def result(content: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "toolu_1", "content": content, **fields}


CALL = {
    "role": "assistant",
    "content": [{"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "it"}}],
}


@pytest.mark.parametrize(
    "content",
    ["hello", [text("hello")], [text("hello", cache_control=MARK)]],
    ids=["string", "list", "marked"],
)
@pytest.mark.parametrize("role", ["user", "assistant", "system"])
def test_a_text_is_the_same_however_it_is_sent(role: str, content: Any) -> None:
    sent = messages_sent(USER, {"role": role, "content": content}, USER)
    assert sent[1] == {"role": role, "content": "hello"}


def test_a_rolling_mark_is_not_in_the_tokens() -> None:
    """sglang #36877: a mark that moves to the last message changed those before it."""
    first = {"role": "user", "content": [text("one", cache_control=MARK)]}
    later = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    last = {"role": "user", "content": [text("three", cache_control={**MARK, "ttl": "1h"})]}
    assert messages_sent(first) == messages_sent(*later, last)[:1]
    assert requested(tools=[{**TOOL, "cache_control": MARK}]).tools == [LOOK]


@pytest.mark.parametrize("system", ["Be brief.\nBe kind.", [text("Be brief."), text("Be kind.")]])
def test_the_system_prompt_is_the_first_message(system: Any) -> None:
    assert messages_sent(USER, system=system) == [
        {"role": "system", "content": "Be brief.\nBe kind."},
        USER,
    ]


def test_a_system_message_stays_where_it_is() -> None:
    """ollama #18431, omlx #1826: moved to the top it made every turn's prompt a new one."""
    note = {"role": "system", "content": [text("It is noon.")]}
    reply = {"role": "assistant", "content": "yes"}
    sent = messages_sent(USER, reply, note, USER, system="Be brief.")
    assert [each["role"] for each in sent] == ["system", "user", "assistant", "system", "user"]
    assert sent[3]["content"] == "It is noon."


def test_tool_results_come_before_the_users_text() -> None:
    both = {"role": "user", "content": [result("blue"), text("What is it?")]}
    assert messages_sent(USER, CALL, both) == [
        USER,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "toolu_1",
                    "type": "function",
                    "function": {"name": "look", "arguments": {"at": "it"}},
                }
            ],
        },
        {"role": "tool", "content": "blue", "tool_call_id": "toolu_1"},
        {"role": "user", "content": "What is it?"},
    ]


@pytest.mark.parametrize(
    ("block", "content"),
    [
        (result("blue"), "blue"),
        (result([text("blue"), text("green")]), "blue\ngreen"),
        (result(None), ""),
        (result([]), ""),
        (result("gone", is_error=True), "Error: gone"),
        (result([text("gone")], is_error=True), "Error: gone"),
        (result("Error: gone", is_error=True), "Error: gone"),
        (result("fine", is_error=False), "fine"),
    ],
)
def test_each_form_of_a_result(block: dict[str, Any], content: str) -> None:
    sent = messages_sent(USER, CALL, {"role": "user", "content": [block]})
    assert sent[-1]["content"] == content


def thinking(words: str, signature: str) -> dict[str, Any]:
    block = {"type": "thinking", "thinking": words, "signature": signature}
    return {"role": "assistant", "content": [block, text("42")]}


@pytest.mark.parametrize("block", [thinking("Hm.", sign("Hm.")), thinking("", seal("Hm."))])
def test_thinking_of_ours_is_replayed(block: dict[str, Any]) -> None:
    sent = messages_sent(USER, block, USER)
    assert sent[1] == {"role": "assistant", "content": "42", "reasoning_content": "Hm."}


@pytest.mark.parametrize(
    "block",
    [
        thinking("Hm.", "EqQBCgIYAhIM1gbcDa9GJwZA2b3h"),
        thinking("Hm.", ""),
        thinking("Changed.", sign("Hm.")),
        thinking("", seal("Hm.")[:-6]),
        thinking("", sign("Hm.") + ".!!!"),
        thinking("Hm.", "rk1."),
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, text("42")]},
    ],
    ids=["foreign", "none", "changed", "cut", "damaged", "empty", "redacted"],
)
def test_thinking_that_is_not_ours_is_left_out(block: dict[str, Any]) -> None:
    assert messages_sent(USER, block, USER)[1] == {"role": "assistant", "content": "42"}


def test_a_deferred_tool_is_described_where_it_is_referred_to() -> None:
    """9router #3889: a search for tools put what it found at the top, and all was new."""
    deferred = {**TOOL, "name": "peek", "defer_loading": True}
    found = result([{"type": "tool_reference", "tool_name": "peek"}])
    before = requested(tools=[TOOL, deferred], messages=[USER])
    after = requested(
        tools=[deferred, TOOL], messages=[USER, CALL, {"role": "user", "content": [found]}]
    )
    assert before.tools == after.tools == [LOOK]
    assert before.loaded_tools == []
    assert [tool["function"]["name"] for tool in after.loaded_tools] == ["peek"]
    assert after.messages is not None
    assert '"name": "peek"' in after.messages[-1]["content"]
    assert '"properties"' in after.messages[-1]["content"]


def test_a_deferred_tool_is_described_once_however_often_it_is_referred_to() -> None:
    deferred = {**TOOL, "name": "peek", "defer_loading": True}
    found = result([{"type": "tool_reference", "tool_name": "peek"}] * 3)
    sent = messages_sent(USER, CALL, {"role": "user", "content": [found, found]}, tools=[deferred])
    described, *names = sent[2]["content"].split("\n")
    assert '"name": "peek"' in described
    assert names == ["peek", "peek"]
    assert sent[3]["content"] == "peek\npeek\npeek"


def test_all_that_a_tool_returned_is_counted() -> None:
    many = [result([text("")] * (MAX_ITEMS // 2))] * 2
    assert "content parts" in refused(messages=[USER, CALL, {"role": "user", "content": many}])
    long = [result("x" * (MAX_CHARACTERS // 2))] * 2
    message = {"role": "user", "content": long}
    assert "characters of text" in refused(messages=[USER, CALL, message])


def test_thinking_that_is_packed_is_counted_over_the_whole_request() -> None:
    packed = seal("x" * (MAX_CHARACTERS // 2 + 1))
    block = {"type": "thinking", "thinking": "", "signature": packed}
    reply = {"role": "assistant", "content": [block]}
    assert len(messages_sent(USER, reply, USER)) == 3
    assert "characters of text" in refused(messages=[USER, reply, USER, reply, USER])


def test_a_reference_to_no_tool_is_refused() -> None:
    found = {"role": "user", "content": [result([{"type": "tool_reference", "tool_name": "no"}])]}
    assert "'no', which is not among `tools`" in refused(tools=[TOOL], messages=[USER, CALL, found])


def test_a_document_may_have_content_a_context_and_citations_that_are_off() -> None:
    [message] = messages_sent(
        {
            "role": "user",
            "content": [
                {
                    "type": "document",
                    "title": "Notes",
                    "context": "Of May.",
                    "citations": {"enabled": False},
                    "source": {"type": "content", "content": [{"type": "text", "text": "One."}]},
                },
                {"type": "document", "source": {"type": "content", "content": "Two."}},
            ],
        }
    )
    assert message["content"] == "Notes\nOf May.\nOne.\nTwo."


@pytest.mark.parametrize("within", [False, True])
def test_an_uploaded_file_is_refused_with_a_remedy(within: bool) -> None:
    block: dict[str, Any] = {"type": "document", "source": {"type": "file", "file_id": "f"}}
    if within:
        block = {"type": "tool_result", "tool_use_id": "a", "content": [block]}
    message = refused(messages=[{"role": "user", "content": [block]}])
    assert "uploaded files are not supported: send the document" in message


def test_citations_are_refused() -> None:
    source = {"type": "text", "data": "One."}
    block = {"type": "document", "source": source, "citations": {"enabled": True}}
    message = refused(messages=[{"role": "user", "content": [block]}])
    assert "replies have no citations" in message


def test_documents_and_search_results_are_text() -> None:
    blocks = [
        {"type": "document", "title": "Notes", "source": {"type": "text", "data": "One."}},
        {"type": "search_result", "title": "T", "source": "S", "content": [text("Two.")]},
    ]
    [sent] = messages_sent({"role": "user", "content": blocks})
    assert sent["content"] == "Notes\nOne.\nT\nS\nTwo."


def test_blocks_of_other_servers_tools_are_left_out() -> None:
    search = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}
    found = {"type": "web_search_tool_result", "tool_use_id": "s", "content": []}
    sent = messages_sent(USER, {"role": "assistant", "content": [search, found, text("42")]}, USER)
    assert sent[1] == {"role": "assistant", "content": "42"}


def test_a_last_message_of_the_assistant_is_continued() -> None:
    request = requested(messages=[USER, {"role": "assistant", "content": "The answer is ("}])
    assert (request.continue_final_message, request.add_generation_prompt) == (True, False)
    request = requested(messages=[USER, CALL])
    assert (request.continue_final_message, request.add_generation_prompt) == (False, True)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([{"type": "picture"}], "block 0"),
        ([text("x"), {"type": "text"}], "block 1: `text` is missing"),
        (17, "takes a string, or a list of content blocks"),
        ([{"type": "image", "source": {"type": "base64", "data": ""}}], "block 0: `media_type`"),
        ([{"type": "document", "source": {"type": "page", "data": "x"}}], "block 0"),
        ([CALL["content"][0]], "'tool_use' belong in messages of the role 'assistant'"),
    ],
)
def test_invalid_content_is_refused_with_its_place(content: Any, reason: str) -> None:
    assert reason in refused(messages=[{"role": "user", "content": content}])
