"""The grammar of a stream of the Responses API, and the response that its events make up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx

from tests.api.scripted import ServerEvent, events

LIFECYCLE = ("response.created", "response.in_progress")
TERMINAL = ("response.completed", "response.incomplete", "response.failed")
PART_ADDED, PART_DONE = "response.content_part.added", "response.content_part.done"
#: The events between an item's first and last, by its type: before its deltas, these, and behind.
FORMS: dict[str, tuple[tuple[str, ...], str, tuple[str, ...]]] = {
    "message": (
        (PART_ADDED,),
        "response.output_text.delta",
        ("response.output_text.done", PART_DONE),
    ),
    "reasoning": (
        (PART_ADDED,),
        "response.reasoning_text.delta",
        ("response.reasoning_text.done", PART_DONE),
    ),
    "function_call": (
        (),
        "response.function_call_arguments.delta",
        ("response.function_call_arguments.done",),
    ),
    "custom_tool_call": (
        (),
        "response.custom_tool_call_input.delta",
        ("response.custom_tool_call_input.done",),
    ),
}
FIELDS = {"function_call": "arguments", "custom_tool_call": "input"}


def events_of(response: httpx.Response) -> list[ServerEvent]:
    """The events of a stream; comments are left out."""
    assert response.status_code == httpx.codes.OK, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    blocks = response.text.split("\n\n")
    return events("\n\n".join(block for block in blocks if not block.startswith(":")))


def response_of(found: Sequence[ServerEvent]) -> dict[str, Any]:
    """The response of a stream whose grammar is checked: every event's name, number, order, index
    and id, exactly one end, and that the deltas are what the response says in the end."""
    told = [event.json for event in found]
    assert [event.name for event in found] == [each["type"] for each in told]
    assert [each["sequence_number"] for each in told] == list(range(len(told)))
    assert [each["type"] for each in told[:2]] == list(LIFECYCLE)
    *body, last = told
    assert last["type"] in TERMINAL
    assert not any(each["type"] in TERMINAL for each in body)
    response = dict(last["response"])
    for each in told:
        if "response" in each:
            assert each["response"]["id"] == response["id"]
    assert all(each["response"]["status"] == "in_progress" for each in told[:2])
    rest = [each for each in body[2:] if each["type"] != "response.in_progress"]
    built = _items(rest, is_failed=last["type"] == "response.failed")
    assert built == response["output"], "the deltas are not what the response says"
    return response


def _items(told: list[dict[str, Any]], *, is_failed: bool) -> list[dict[str, Any]]:
    items, at = list[dict[str, Any]](), 0
    while at < len(told):
        added = told[at]
        assert added["type"] == "response.output_item.added", added
        assert added["output_index"] == len(items)
        ends = (
            place
            for place in range(at, len(told))
            if told[place]["type"] == "response.output_item.done"
        )
        end = next(ends, None)
        if end is None:
            assert is_failed, "an item has no end"
            break
        items.append(_item(added["item"], told[at + 1 : end], told[end], len(items)))
        at = end + 1
    ids = [item["id"] for item in items]
    assert len(set(ids)) == len(ids)
    return items


def _item(
    added: dict[str, Any], within: list[dict[str, Any]], done: dict[str, Any], index: int
) -> dict[str, Any]:
    kind, item = added["type"], dict(done["item"])
    before, delta, behind = FORMS[kind]
    kinds = [each["type"] for each in within]
    deltas = [each for each in within if each["type"] == delta]
    assert kinds == [*before, *(delta for _ in deltas), *behind]
    assert added["status"] == "in_progress"
    assert item["status"] in ("completed", "incomplete")
    assert done["output_index"] == index
    for each in within:
        assert (each["item_id"], each["output_index"]) == (added["id"], index)
        assert each.get("content_index", 0) == 0
    text = "".join(each["delta"] for each in deltas)
    if field := FIELDS.get(kind):
        assert added[field] == ""
        assert item[field] == within[-1][field] == (text or item[field])
        added = {**added, field: item[field]}
    else:
        assert added["content"] == []
        [part] = item["content"]
        assert part == within[-1]["part"]
        assert part["text"] == within[-2]["text"] == text
        added = {**added, "content": item["content"]}
    if "encrypted_content" in item:
        added["encrypted_content"] = item["encrypted_content"]
    assert {**added, "status": item["status"]} == item
    return item
