"""The grammar of a stream of Anthropic's Messages. Every stream in the tests is checked."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.api.scripted import events

Event = dict[str, Any]
ENDS = ("message_delta", "message_stop")
DELTAS = {
    "text": {"text_delta"},
    "thinking": {"thinking_delta", "signature_delta"},
    "tool_use": {"input_json_delta"},
}


def message_of(sent: list[Event]) -> Event:
    """The message that a client puts together; raises where the events are in no right order."""
    events = [event for event in sent if event["type"] != "ping"]
    assert [event["type"] for event in (events[0], *events[-2:])] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    assert sum(event["type"] in ENDS for event in events) == len(ENDS), "there is one end"
    message = dict(events[0]["message"])
    assert message["type"] == "message"
    assert message["role"] == "assistant"
    assert message["id"].startswith("msg_")
    assert message["content"] == []
    assert message["stop_reason"] is None
    message["content"] = _blocks(events[1:-2])
    *_, delta, _ = events
    assert delta["usage"]["output_tokens"] >= message["usage"]["output_tokens"]
    return {**message, **delta["delta"], "usage": {**message["usage"], **delta["usage"]}}


def _blocks(events: list[Event]) -> list[Event]:
    blocks: list[Event] = []
    is_open = False
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(blocks)
                blocks.append({**event["content_block"], "pieces": []})
                is_open = True
            case "content_block_delta":
                _add(blocks[-1], event, len(blocks) - 1, is_open=is_open)
            case "content_block_stop":
                assert is_open
                assert event["index"] == len(blocks) - 1
                is_open = False
            case other:
                raise AssertionError(f"{other} between blocks")
    assert not is_open
    return [_closed(block) for block in blocks]


def _add(block: Event, event: Event, index: int, *, is_open: bool) -> None:
    assert is_open
    assert event["index"] == index
    delta = event["delta"]
    assert delta["type"] in DELTAS[block["type"]]
    assert not block.get("signature"), "a signature ends its block"
    if delta["type"] == "signature_delta":
        block["signature"] = delta["signature"]
    else:
        [piece] = [value for name, value in delta.items() if name != "type"]
        assert piece != ""
        block["pieces"].append(piece)


def _closed(block: Event) -> Event:
    text = "".join(block.pop("pieces"))
    match block["type"]:
        case "text" | "thinking" as kind:
            block[kind] = text
        case "tool_use":
            block["input"] = json.loads(text or "{}")
    if block["type"] == "thinking":
        assert block["signature"]
    return block


def events_of(response: httpx.Response) -> list[Event]:
    """The events of a stream, each named as its type is."""
    assert response.status_code == httpx.codes.OK, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    found = events(response.text)
    assert [event.name for event in found] == [event.json["type"] for event in found]
    return [event.json for event in found]
