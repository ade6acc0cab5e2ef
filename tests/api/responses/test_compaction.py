"""A conversation is compacted to the user's messages and a summary that the model wrote."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from rekindle.api.responses.compaction import INSTRUCTION, MAX_SUMMARY_TOKENS
from rekindle.api.responses.request import SUMMARY
from tests.api.live import live
from tests.api.responses.asking import PATH, TOOL, answered, ask, front_of, messages_sent
from tests.api.responses.published import ITEM_KEYS, check_compaction
from tests.api.scripted import Front, calling, error, reply

USER = {"role": "user", "content": "Launch on Tuesday."}
REPLY = {"role": "assistant", "content": "Noted."}
COMPACT = f"{PATH}/compact"


def compacted(front: Front, *items: dict[str, Any], **fields: Any) -> dict[str, Any]:
    response = front.post(COMPACT, {"model": "tiny", "input": list(items), **fields})
    assert response.status_code == httpx.codes.OK, response.text
    return dict(response.json())


def test_the_summary_of_a_conversation_stands_for_its_replies() -> None:
    front = front_of(reply(" Launch: ", "Tuesday."), reply("Yes."))
    response = compacted(front, USER, REPLY)
    check_compaction(response)
    message, summary = response["output"]
    assert (message["role"], message["content"][0]["text"]) == ("user", USER["content"])
    assert summary.keys() == {"id", "type"} | ITEM_KEYS["compaction"]
    assert "Tuesday" not in summary["encrypted_content"], "it is packed"
    answered(front, input=[*response["output"], {"role": "user", "content": "When?"}])
    assert front.runtime.requests[1].messages == [
        USER,
        {"role": "user", "content": f"{SUMMARY}\n\nLaunch: Tuesday."},
        {"role": "user", "content": "When?"},
    ]


def test_the_prompt_of_a_summary_begins_like_the_conversation() -> None:
    """So that the state of its tokens is reused."""
    front = front_of()
    about = {"instructions": "Be brief.", "tools": [TOOL]}
    compacted(front, USER, REPLY, **about)
    answered(front, input=[USER, REPLY], **about)
    summary, other = front.runtime.requests
    assert (summary.messages or [])[:-1] == other.messages
    assert (summary.messages or [])[-1] == {"role": "user", "content": INSTRUCTION}
    assert summary.tools == other.tools
    assert summary.tool_use.choice == "none"
    assert summary.max_tokens == MAX_SUMMARY_TOKENS


def test_the_instruction_joins_a_last_message_of_the_user() -> None:
    front = front_of()
    compacted(front, USER)
    [only] = front.runtime.requested.messages or [{}]
    assert only["content"] == f"{USER['content']}\n\n{INSTRUCTION}"


def test_a_stored_response_can_be_compacted() -> None:
    front = front_of(calling(("look", "{}")), reply("Seen."), reply("Summary."))
    first = answered(front, input=[USER], tools=[TOOL])
    call = first["output"][0]["call_id"]
    output = {"type": "function_call_output", "call_id": call, "output": "sun"}
    second = answered(front, input=[output], tools=[TOOL], previous_response_id=first["id"])
    response = compacted(front, previous_response_id=second["id"])
    assert [item["type"] for item in response["output"]] == ["message", "compaction"]
    sent = front.runtime.requests[2]
    roles = [each["role"] for each in sent.messages or ()]
    assert roles == ["user", "assistant", "tool", "assistant", "user"]
    assert sent.names is not None
    assert sent.names.cache_key == second["id"]


def test_instructions_in_the_input_are_kept() -> None:
    rule = {"role": "developer", "content": "Be kind."}
    output = compacted(front_of(), rule, USER, REPLY)["output"]
    assert [item.get("role") for item in output] == ["developer", "user", None]


def test_a_compacted_conversation_can_be_compacted_again() -> None:
    front = front_of(reply("One."), reply("Two."))
    first = compacted(front, USER, REPLY)
    second = compacted(front, *first["output"], {"role": "user", "content": "And?"}, REPLY)
    assert [item["type"] for item in second["output"]] == ["message", "message", "compaction"]
    assert any("One." in each["content"] for each in front.runtime.requests[1].messages or ())


def test_the_model_has_to_be_named() -> None:
    refusal = front_of().post(COMPACT, {"input": "hello"})
    assert refusal.status_code == httpx.codes.BAD_REQUEST
    assert error(refusal)["message"] == "`model` is missing."


@pytest.mark.parametrize("content", ["gAAAA", "rk1.AAAA.AAAA"])
def test_a_compaction_of_another_server_is_refused(content: str) -> None:
    item = {"type": "compaction", "encrypted_content": content}
    refusal = ask(front_of(), input=[item, USER])
    assert refusal.status_code == httpx.codes.BAD_REQUEST
    assert "send the messages that it stands for" in error(refusal)["message"]


def test_a_stored_compaction_is_part_of_the_next_conversation() -> None:
    front = front_of(reply("Summary."), reply("Yes."))
    first = answered(front, input=compacted(front, USER, REPLY)["output"])
    answered(front, input="More?", previous_response_id=first["id"])
    sent = front.runtime.requests[2].messages or []
    assert [each["role"] for each in sent] == ["user", "user", "assistant", "user"]
    assert messages_sent(*compacted(front_of(), USER)["output"])[0] == USER


def test_the_clients_own_method_compacts() -> None:
    front = front_of(reply("Summary."), reply("Yes."))
    with (
        live(front) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client,
    ):
        items: Any = [USER, REPLY]
        window = client.responses.compact(model="tiny", input=items)
        assert window.object == "response.compaction"
        assert window.usage.total_tokens == window.usage.input_tokens + window.usage.output_tokens
        again: Any = [item.model_dump(exclude_none=True, warnings="none") for item in window.output]
        client.responses.create(model="tiny", input=again)
    assert SUMMARY in (front.runtime.requests[1].messages or [])[-1]["content"]
