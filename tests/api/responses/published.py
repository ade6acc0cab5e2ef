"""The published shape of responses, their items and their events.

OpenAI's client has a type for each of them. Its types leave out which keys have to be present even
if they are null, so these are listed here, from the schema of Open Responses (2026-04-24).
"""

from __future__ import annotations

from typing import Any, get_args

from openai.types.responses import CompactedResponse, Response, ResponseStreamEvent

RESPONSE_KEYS = frozenset(
    (
        *("background", "completed_at", "created_at", "error", "frequency_penalty", "id"),
        *("incomplete_details", "instructions", "max_output_tokens", "max_tool_calls", "metadata"),
        *("model", "object", "output", "parallel_tool_calls", "presence_penalty"),
        *("previous_response_id", "prompt_cache_key", "reasoning", "safety_identifier"),
        *("service_tier", "status", "store", "temperature", "text", "tool_choice", "tools"),
        *("top_logprobs", "top_p", "truncation", "usage", "user"),
    )
)
#: Keys that may not be null.
NUMBERS = ("frequency_penalty", "presence_penalty", "temperature", "top_logprobs", "top_p")
TOOL_KEYS = {"type", "name", "description", "parameters", "strict"}
FORMAT_KEYS = {"type", "name", "description", "schema", "strict"}
#: Keys of each type of item, besides `id` and `type`.
ITEM_KEYS = {
    "message": {"status", "role", "content"},
    "reasoning": {"status", "summary", "content"},
    "function_call": {"status", "call_id", "name", "arguments"},
    "custom_tool_call": {"status", "call_id", "name", "input"},
    "compaction": {"encrypted_content"},
}
[UNION, *_] = get_args(ResponseStreamEvent)
EVENTS: dict[str, Any] = {
    get_args(each.model_fields["type"].annotation)[0]: each for each in get_args(UNION)
}


def check_response(response: dict[str, Any]) -> None:
    assert response.keys() >= RESPONSE_KEYS, RESPONSE_KEYS - response.keys()
    assert all(isinstance(response[name], int | float) for name in NUMBERS)
    assert (response["completed_at"] is not None) == (response["status"] == "completed")
    for tool in response["tools"]:
        assert tool["type"] != "function" or tool.keys() >= TOOL_KEYS
    form = response["text"]["format"]
    assert form["type"] != "json_schema" or form.keys() == FORMAT_KEYS
    check_items(response["output"])
    Response.model_validate(response, strict=True)


def check_items(items: list[dict[str, Any]]) -> None:
    for item in items:
        assert item.keys() >= {"id", "type"} | ITEM_KEYS.get(item["type"], set()), item
        for part in item.get("content", ()):
            assert part["type"] != "output_text" or "annotations" in part


def check_event(event: dict[str, Any]) -> None:
    """Check an event. A response or an item in it is checked as well."""
    EVENTS[event["type"]].model_validate(event, strict=True)
    if "response" in event:
        check_response(event["response"])
    if "item" in event:
        check_items([event["item"]])


def check_compaction(response: dict[str, Any]) -> None:
    assert response.keys() == {"id", "object", "created_at", "output", "usage"}
    check_items(response["output"])
    # OpenAI's type of an output message is that of a reply; here it is the user's.
    others = [item for item in response["output"] if item["type"] != "message"]
    CompactedResponse.model_validate({**response, "output": others}, strict=True)
