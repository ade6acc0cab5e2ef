"""A message, whole and streamed: its content, its end and its usage."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from msgspec import structs

from rekindle.api.anthropic.reply import MessageReply
from rekindle.api.base.fields import TextBudget
from rekindle.api.base.signature import signed_text
from rekindle.protocol.events import CacheReport, Finished, Reason, Started
from tests.api.anthropic.asking import HELLO, PATH, ask, error, requested, streamed, whole
from tests.api.anthropic.stream_grammar import events_of
from tests.api.live import live
from tests.api.scripted import (
    Front,
    Pause,
    Script,
    ScriptedRuntime,
    Step,
    calling,
    delta,
    failed,
    finished,
    hit,
    reasoning,
    reply,
)

PARIS = '{"city": "Paris", "days": 2}'
REASONED: Script = [Started(0, 10, 0), reasoning("Hm, "), reasoning("two."), delta("2"), finished()]
CACHED: Script = [Started(0, 10, 7, hit(7)), delta("x"), finished(cache=hit(7))]
DIED = failed(503, "server_error", "model_restarting", "the process died")


def both(*script: Step, **fields: Any) -> dict[str, Any]:
    """A message that is the same whole and streamed."""
    one, other = whole(*script, **fields), streamed(*script, **fields)
    for each in (one, other):
        assert each.pop("id").startswith("msg_")
    one.pop("x_cache")
    assert one == other
    return one


def test_a_text_is_one_block() -> None:
    assert both(*reply("Hel", "lo")) == {
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "diagnostics": None,
        "usage": {
            "input_tokens": 10,
            "cache_read_input_tokens": 0,
            "cache_creation_input_tokens": 0,
            "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
            "service_tier": "standard",
            "output_tokens": 2,
            "output_tokens_details": {"thinking_tokens": 0},
        },
    }


def test_calls_are_blocks_with_their_arguments() -> None:
    message = both(*calling(("weather", PARIS), ("quit", "{}"), before=[delta("Let me look.")]))
    assert message["stop_reason"] == "tool_use"
    assert message["content"] == [
        {"type": "text", "text": "Let me look."},
        {"type": "tool_use", "id": "call_0", "name": "weather", "input": json.loads(PARIS)},
        {"type": "tool_use", "id": "call_1", "name": "quit", "input": {}},
    ]


def test_arguments_come_while_they_are_generated() -> None:
    """ollama #14902: clients gave up on a stream that was silent while arguments were written."""
    events = events_of(ask(Front(ScriptedRuntime(calling(("weather", PARIS)))), stream=True))
    deltas = [event for event in events if event["type"] == "content_block_delta"]
    pieces = [event["delta"]["partial_json"] for event in deltas]
    assert len(pieces) > 3
    assert "".join(pieces) == PARIS


@pytest.mark.parametrize("end", ["length", "stop"])
@pytest.mark.parametrize("arguments", ["", '{"city": "Par', "[1"])
def test_a_call_that_was_cut_off_is_left_out(end: Any, arguments: str) -> None:
    """Clients run a call as it is, so it must not have an input that the model did not write."""
    script = [
        *calling(("quit", "{}"), ("weather", arguments))[:-1],
        finished(end, completion_tokens=64),
    ]
    message = whole(*script)
    assert [(block["name"], block["input"]) for block in message["content"]] == [("quit", {})]
    assert message["stop_reason"] == {"length": "max_tokens", "stop": "end_turn"}[end]


def test_a_stream_ends_the_block_of_a_call_that_was_cut_off() -> None:
    end = finished("length", completion_tokens=64)
    script = [*calling(("weather", '{"city": "Par'))[:-1], end]
    events = events_of(ask(Front(ScriptedRuntime(script)), stream=True))
    pieces = [each["delta"].get("partial_json", "") for each in events if "delta" in each]
    assert "".join(pieces) == '{"city": "Par'
    assert [event["type"] for event in events[-3:]] == [
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"


def test_a_complete_call_is_kept_when_the_reply_ends_at_its_limit() -> None:
    script = [*calling(("weather", PARIS))[:-1], finished("length")]
    assert [block["input"] for block in both(*script)["content"]] == [json.loads(PARIS)]


def test_reasoning_is_a_block_of_thinking_that_is_signed() -> None:
    thinking, text = both(*REASONED)["content"]
    assert thinking["thinking"] == "Hm, two."
    assert signed_text("Hm, two.", thinking["signature"], TextBudget()) == "Hm, two."
    assert text == {"type": "text", "text": "2"}


def test_thinking_that_is_omitted_is_in_its_signature() -> None:
    fields = {"thinking": {"type": "adaptive", "display": "omitted"}}
    thinking, _ = both(*REASONED, **fields)["content"]
    assert thinking["thinking"] == ""
    assert signed_text("", thinking["signature"], TextBudget()) == "Hm, two."


def test_a_text_of_nothing_ends_no_block() -> None:
    script = [Started(0, 10, 0), reasoning("Hm, "), delta(""), *REASONED[2:]]
    thinking, text = both(*script)["content"]
    assert (thinking["thinking"], text["text"]) == ("Hm, two.", "2")


def test_a_reply_of_nothing_has_no_blocks() -> None:
    assert both(Started(0, 10, 0), finished(completion_tokens=0))["content"] == []


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (finished("stop"), "end_turn"),
        (finished("tool_calls"), "tool_use"),
        (finished("length", completion_tokens=64), "max_tokens"),
        (finished("length", completion_tokens=63), "model_context_window_exceeded"),
    ],
)
def test_each_end_has_its_reason(end: Finished, reason: str) -> None:
    message = both(*reply("x", end=end))
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, None)


def test_the_reply_names_its_stop_sequence() -> None:
    end = structs.replace(finished(), stop_string="END")
    message = both(*reply("x", end=end), stop_sequences=["STOP", "END"])
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "END")
    assert requested(stop_sequences=["STOP", "END"]).stop == ["STOP", "END"]


def marked(ttl: str | None) -> dict[str, Any]:
    control = {"type": "ephemeral", **({"ttl": ttl} if ttl else {})}
    return {"system": [{"type": "text", "text": "Be brief.", "cache_control": control}]}


@pytest.mark.parametrize(("ttl", "place"), [(None, "5m"), ("5m", "5m"), ("1h", "1h")])
def test_read_and_created_tokens_add_up_to_the_prompt(ttl: str | None, place: str) -> None:
    spent = both(*CACHED, **marked(ttl))["usage"]
    assert spent["cache_read_input_tokens"] == 7
    assert spent["cache_creation_input_tokens"] == 3
    assert spent["input_tokens"] == 0
    assert spent["cache_creation"][f"ephemeral_{place}_input_tokens"] == 3
    unmarked = both(*CACHED)["usage"]
    assert unmarked["cache_creation_input_tokens"] == 0
    assert unmarked["input_tokens"] == 3


def test_tokens_that_were_not_pinned_are_not_created() -> None:
    """The total is the same: input tokens plus tokens read."""
    refused = CacheReport("hit", Reason.FULL_MATCH, 7, 12, "ram", pin_refused=True)
    spent = whole(*CACHED[:-1], finished(cache=refused), **marked("1h"))["usage"]
    assert spent["cache_creation_input_tokens"] == 0
    assert spent["cache_creation"]["ephemeral_1h_input_tokens"] == 0
    assert (spent["input_tokens"], spent["cache_read_input_tokens"]) == (3, 7)


def test_usage_is_in_the_first_event_already() -> None:
    start, *_ = events_of(ask(Front(ScriptedRuntime(CACHED)), stream=True))
    spent = start["message"]["usage"]
    assert (spent["cache_read_input_tokens"], spent["input_tokens"]) == (7, 3)


def test_the_cache_report_is_in_the_message_and_in_the_last_delta() -> None:
    cache = CacheReport("hit", Reason.FULL_MATCH, 7, 12, "ram", normalised=["tools"])
    script = reply("x", end=finished(cache=cache))
    assert whole(*script)["x_cache"]["normalised"] == ["tools"]
    *_, delta, _ = events_of(ask(Front(ScriptedRuntime(script)), stream=True))
    assert delta["x_cache"]["reused_tokens"] == 7


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_before_the_first_event_has_its_status(stream: bool) -> None:
    response = ask(Front(ScriptedRuntime([DIED])), stream=stream)
    assert response.status_code == httpx.codes.SERVICE_UNAVAILABLE
    assert error(response) == {"type": "overloaded_error", "message": "the process died"}


def test_a_failure_in_a_stream_is_its_last_event() -> None:
    script: Script = [Started(0, 10, 0), delta("x"), DIED]
    *_, last = events_of(ask(Front(ScriptedRuntime(script)), stream=True))
    assert last["type"] == "error"
    assert last["error"] == {"type": "overloaded_error", "message": "the process died"}


@pytest.mark.parametrize("begun", [[], [Started(0, 10, 0)], [Started(0, 10, 0), delta("x")]])
def test_a_waiting_client_gets_pings(begun: list[Step], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MessageReply, "keep_alive_s", 0.01)
    runtime = ScriptedRuntime([*begun, Pause()])
    with (
        live(Front(runtime)) as server,
        server.client() as client,
        client.stream("POST", PATH, json={**HELLO, "stream": True}) as response,
    ):
        names = (line for line in response.iter_lines() if line.startswith("event: "))
        if begun:
            assert any(name == "event: message_start" for name in names)
        pings = (name for name in names if name == "event: ping")
        assert [next(pings) for _ in range(3)]


def test_pings_do_not_disturb_the_order_of_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MessageReply, "keep_alive_s", 0.0)
    assert streamed(*calling(("weather", PARIS), before=[delta("Hm.")]))["content"][1]["name"]
