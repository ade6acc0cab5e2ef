"""A response, whole and streamed: its items, its end and its usage."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from rekindle.api.base import documents as stored
from rekindle.api.base.fields import TextBudget
from rekindle.api.base.signature import signed_text
from rekindle.api.responses.reply import ResponseReply
from rekindle.protocol.admin import StoreDocument
from rekindle.protocol.events import Prefill, Started, TokenLogprob
from tests.api.responses.asking import (
    TOOL,
    Documents,
    StoppedRuntime,
    answered,
    ask,
    both,
    front_of,
)
from tests.api.responses.stream_grammar import events_of, response_of
from tests.api.scripted import (
    Front,
    Pause,
    Script,
    ScriptedRuntime,
    calling,
    delta,
    error,
    failed,
    finished,
    hit,
    reasoning,
    reply,
)

PARIS = '{"city": "Paris", "days": 2}'
REASONED: Script = [Started(0, 10, 0), reasoning("Hm, "), reasoning("two."), delta("2"), finished()]
TOO_LONG = failed(400, "invalid_request_error", "context_length_exceeded", "too long", "messages")


def text(words: str, **fields: Any) -> dict[str, Any]:
    return {"type": "output_text", "text": words, "annotations": [], "logprobs": [], **fields}


def test_a_text_is_one_message() -> None:
    response = both(*reply("Hel", "lo"))
    assert response["output"] == [
        {
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [text("Hello")],
        }
    ]
    assert response["status"] == "completed"
    assert response["error"] is response["incomplete_details"] is None
    assert response["store"] is True
    assert response["object"] == "response"


def test_usage_counts_tokens_read_from_and_written_to_the_cache() -> None:
    script = [Started(0, 10, 7), delta("x"), finished(cache=hit(7), reasoning_tokens=1)]
    response = both(*script, prompt_cache_options={"ttl": "12h"})
    assert response["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {
            "cached_tokens": 7,
            "cache_write_tokens": 3,
            "cache_write_tokens_details": {"ttl_30m_tokens": 0, "ttl_12h_tokens": 3},
        },
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 1},
        "total_tokens": 12,
    }
    assert response["x_cache"]["reused_tokens"] == 7


def test_a_reply_cut_by_the_limit_is_incomplete() -> None:
    response = both(*reply("Hel", end=finished("length")), max_output_tokens=2)
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"
    assert "completed_at" not in response


def test_reasoning_is_an_item_before_the_message() -> None:
    response = both(*REASONED)
    thought, message = response["output"]
    assert thought == {
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "Hm, two."}],
        "status": "completed",
    }
    assert message["content"] == [text("2")]


def test_reasoning_is_packed_for_clients_that_ask_for_it() -> None:
    response = both(*REASONED, include=["reasoning.encrypted_content"], store=False)
    packed = response["output"][0]["encrypted_content"]
    assert signed_text("", packed, TextBudget()) == "Hm, two."


def test_calls_are_items_of_their_own() -> None:
    script = calling(("look", PARIS), ("look", "{}"), before=[delta("Well.")])
    response = both(*script, tools=[TOOL])
    message, first, second = response["output"]
    assert message["content"] == [text("Well.")]
    assert first == {
        "type": "function_call",
        "call_id": "call_0",
        "name": "look",
        "arguments": PARIS,
        "status": "completed",
    }
    assert (second["call_id"], second["arguments"]) == ("call_1", "{}")
    assert response["status"] == "completed"


def test_missing_output_index() -> None:
    """llama.cpp #20607: every delta says which item it is of, by the id that the item has."""
    script = calling(("look", PARIS), before=[reasoning("Hm."), delta("Well.")])
    told = events_of(ask(front_of(script), tools=[TOOL], stream=True))
    deltas = [event.json for event in told if str(event.name).endswith(".delta")]
    ids = [item["id"] for item in response_of(told)["output"]]
    assert [each["output_index"] for each in deltas] == [0, 1, *(2 for _ in deltas[2:])]
    assert all(each["item_id"] == ids[each["output_index"]] for each in deltas)


@pytest.mark.parametrize("end", ["length", "stop"])
@pytest.mark.parametrize("arguments", ["", '{"city": "Par'])
def test_a_call_that_was_cut_off_is_incomplete_and_not_shown_to_the_model(
    end: Any, arguments: str
) -> None:
    script = [*calling(("look", "{}"), ("look", arguments))[:-1], finished(end)]
    whole, cut = both(*script, tools=[TOOL])["output"]
    assert (whole["status"], whole["arguments"]) == ("completed", "{}")
    assert (cut["status"], cut["arguments"]) == ("incomplete", arguments)
    front = front_of(script, reply("x"))
    first = answered(front, tools=[TOOL])
    answered(front, tools=[TOOL], previous_response_id=first["id"], input="Again.")
    sent = (front.runtime.requests[1].messages or [])[1]
    assert len(sent["tool_calls"]) == 1


def test_silence_while_tool_arguments_are_generated() -> None:
    """ollama #14902: arguments come as they are written."""
    told = events_of(ask(front_of(calling(("look", PARIS))), tools=[TOOL], stream=True))
    pieces = [
        event.json["delta"]
        for event in told
        if event.name == "response.function_call_arguments.delta"
    ]
    assert len(pieces) > 3
    assert "".join(pieces) == PARIS


CUSTOM: dict[str, Any] = {"type": "custom", "name": "patch", "description": "Changes a file."}


def test_the_input_of_a_custom_tool_is_text() -> None:
    script = calling(("patch", r'{"input": "line \"one\"\nline \u00e4 \ud83d\ude00"}'))
    response = both(*script, tools=[CUSTOM])
    assert response["output"] == [
        {
            "type": "custom_tool_call",
            "call_id": "call_0",
            "name": "patch",
            "input": 'line "one"\nline ä 😀',
            "status": "completed",
        }
    ]


def test_a_call_says_which_namespace_its_tool_is_of() -> None:
    tools = [{"type": "namespace", "name": "crm", "description": "Customers.", "tools": [TOOL]}]
    [call] = both(*calling(("crm__look", PARIS)), tools=tools)["output"]
    assert (call["name"], call["namespace"]) == ("look", "crm")


def test_logprobs_come_when_they_are_asked_for() -> None:
    logs = [[TokenLogprob(b"Hel", -0.5, [(b"Hel", -0.5), (b"\xff", -float("inf"))])]]
    response = both(
        *reply("Hel", logs=logs), include=["message.output_text.logprobs"], top_logprobs=2
    )
    [part] = response["output"][0]["content"]
    [token] = part["logprobs"]
    assert token["token"] == "Hel"
    assert token["top_logprobs"][1] == {"token": "�", "logprob": -9999.0, "bytes": [255]}


def test_an_empty_text_makes_no_item() -> None:
    assert both(Started(0, 10, 0), finished())["output"] == []


def test_overflow_is_a_failed_response_in_a_stream() -> None:
    """Codex makes its conversation shorter when it reads this, and gives up at a status."""
    front = front_of([TOO_LONG])
    response = answered(front, stream=True)
    assert response["status"] == "failed"
    assert response["error"]["code"] == "context_length_exceeded"
    assert response["error"]["param"] == "input"
    whole = ask(front)
    assert whole.status_code == httpx.codes.BAD_REQUEST
    assert error(whole) == {
        "message": "too long",
        "type": "invalid_request_error",
        "param": "input",
        "code": "context_length_exceeded",
    }


def test_a_failure_before_the_first_event_is_a_status() -> None:
    busy = failed(429, "rate_limit_error", "queue_full", "try again later")
    response = ask(front_of([busy]), stream=True)
    assert response.status_code == httpx.codes.TOO_MANY_REQUESTS
    assert error(response)["code"] == "queue_full"


def test_a_failure_in_a_stream_is_its_last_event() -> None:
    died = failed(503, "server_error", "model_restarting", "the process died")
    script: Script = [Started(0, 10, 0), reasoning("Hm."), delta("x"), died]
    response = answered(front_of(script), stream=True)
    assert response["status"] == "failed"
    assert response["error"]["message"] == "the process died"
    assert [item["type"] for item in response["output"]] == ["reasoning"]


def test_a_long_prefill_sends_keep_alives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ResponseReply, "keep_alive_s", 0.01)
    signs, enough = list[bytes](), asyncio.Event()
    keep_alive = ResponseReply.keep_alive

    def counted(self: ResponseReply) -> bytes:
        signs.append(keep_alive(self))
        if len(signs) == 2:
            enough.set()
        return signs[-1]

    class Slow(ScriptedRuntime):
        async def paused(self) -> None:
            await enough.wait()

    monkeypatch.setattr(ResponseReply, "keep_alive", counted)
    runtime = Slow([Pause(), *reply("x")], answers=Documents().answer)
    told = events_of(ask(Front(runtime), stream=True))
    assert [event.name for event in told].count("response.in_progress") > 2
    assert response_of(told)["status"] == "completed"


def test_a_response_for_which_there_is_no_room_says_that_it_is_not_stored() -> None:
    runtime = ScriptedRuntime(answers=Documents(has_room=False).answer)
    assert answered(Front(runtime))["store"] is False
    runtime = ScriptedRuntime(answers=Documents(has_room=False).answer)
    assert answered(Front(runtime), stream=True)["store"] is False


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_the_runtime_does_not_confirm_is_not_called_stored(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(stored, "SAVE_TIMEOUT_S", 0.01)
    assert answered(Front(StoppedRuntime()), stream=stream)["store"] is False


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_is_in_memory_only_says_so(stream: bool) -> None:
    runtime = ScriptedRuntime(answers=Documents(durable=False).answer)
    response = answered(Front(runtime), stream=stream)
    assert (response["store"], response["durable"]) == (True, False)
    assert "durable" not in answered(front_of(), stream=stream)


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_with_store_false_is_not_stored(stream: bool) -> None:
    front = front_of()
    assert answered(front, store=False, stream=stream)["store"] is False
    assert not any(isinstance(each.op, StoreDocument) for each in front.runtime.admin_requests)


def test_a_response_repeats_the_request() -> None:
    asked: dict[str, Any] = {
        "instructions": "Be brief.",
        "max_output_tokens": 7,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "reasoning": {"effort": "low", "summary": None},
        "temperature": 0.5,
        "tool_choice": {"type": "function", "name": "look"},
        "tools": [{**TOOL, "strict": None}],
        "top_p": 0.25,
        "user": "u",
        "prompt_cache_key": "k",
    }
    response = answered(front_of(calling(("look", "{}"))), **asked)
    assert {name: response[name] for name in asked} == asked
    assert response["text"] == {"format": {"type": "text"}}
    assert response["model"] == "tiny"


def test_progress_makes_no_event() -> None:
    script: Script = [Started(0, 10, 0), Prefill(0, 5, 10), delta("x"), finished()]
    assert answered(front_of(script), stream=True)["status"] == "completed"
