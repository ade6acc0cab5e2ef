"""Stored responses: retrieved, listed, cancelled, deleted; and references to their items."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest

from rekindle.protocol.events import Started
from tests.api.live import live
from tests.api.responses.asking import (
    PATH,
    Documents,
    answered,
    ask,
    front_of,
    interrupted,
    runtime_of,
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
    finished,
    reasoning,
    reply,
)

GOING_ON: Script = [Started(0, 10, 0), reasoning("Hm."), delta("one, "), delta("two, "), Pause()]


def test_unknown_responses_are_404s() -> None:
    front = front_of()
    for method, path in (
        ("GET", f"{PATH}/resp_x"),
        ("GET", f"{PATH}/conv_x"),
        ("DELETE", f"{PATH}/resp_x"),
        ("GET", f"{PATH}/resp_x/input_items"),
        ("POST", f"{PATH}/resp_x/cancel"),
        ("GET", "/responses/resp_x"),
    ):
        response = front.request(method, path)
        assert response.status_code == httpx.codes.NOT_FOUND, path
        assert error(response)["code"] == "response_not_found"


@pytest.mark.parametrize("key", ["resp_x", "conv_x"])
def test_an_unknown_previous_response_is_an_error_with_a_remedy(key: str) -> None:
    documents = Documents()
    documents.kept["conv_x"] = b"{}"  # which is none
    response = ask(Front(ScriptedRuntime(answers=documents.answer)), previous_response_id=key)
    assert response.status_code == httpx.codes.BAD_REQUEST
    told = error(response)
    assert told["code"] == "previous_response_not_found"
    assert told["param"] == "previous_response_id"
    assert "Send the whole conversation as `input`" in told["message"]


def test_a_response_is_not_streamed_again() -> None:
    front = front_of()
    key = answered(front)["id"]
    response = front.get(f"{PATH}/{key}?stream=true")
    assert response.status_code == httpx.codes.BAD_REQUEST
    assert "background" in error(response)["message"]
    assert front.get(f"{PATH}/{key}?stream=false").json()["id"] == key


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "order=up", "after=msg_x"])
def test_a_wrong_page_is_refused(query: str) -> None:
    front = front_of()
    response = front.get(f"{PATH}/{answered(front)['id']}/input_items?{query}")
    assert response.status_code == httpx.codes.BAD_REQUEST


def test_a_response_that_is_being_computed_is_cancelled() -> None:
    async def cancelled(url: str) -> tuple[list[Any], Any, Any]:
        async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:
            told, response = list[Any](), None
            async for event in await client.responses.create(
                model="tiny", input="count", stream=True
            ):
                told.append(event)
                if event.type == "response.output_text.delta" and event.delta == "two, ":
                    key: str = told[0].response.id
                    seen = await client.responses.retrieve(key)
                    assert (seen.status, len(seen.output)) == ("in_progress", 1)
                    response = await client.responses.cancel(key)
            return told, response, await client.responses.retrieve(key)

    with live(Front(runtime_of(GOING_ON))) as server:
        told, response, kept = asyncio.run(cancelled(f"{server.url}/v1"))
        assert server.runtime.cancelled_turns == 1
    assert response.status == kept.status == "cancelled"
    assert response.output_text == kept.output_text == "one, two, "
    assert [event.sequence_number for event in told] == list(range(len(told)))
    assert told[-1].type == "response.incomplete"
    assert told[-1].response.output == response.output
    assert [item.status for item in response.output] == ["completed", "incomplete"]


def test_a_response_that_has_ended_is_not_cancelled() -> None:
    front = front_of()
    response = front.request("POST", f"{PATH}/{answered(front)['id']}/cancel")
    assert response.status_code == httpx.codes.BAD_REQUEST
    assert "completed" in error(response)["message"]


async def cancel(http: httpx.AsyncClient, path: str) -> httpx.Response:
    return await http.post(f"{path}/cancel")


@pytest.mark.parametrize(
    "at", ["response.output_text.done", "response.output_item.done", "response.completed"]
)
def test_a_response_that_is_ending_ends_once(at: str) -> None:
    front = front_of(reply("Hello"))
    streamed, [refusal] = interrupted(front, at, cancel)
    response = response_of(events_of(streamed))
    assert response["status"] == "completed"
    assert refusal.status_code == httpx.codes.BAD_REQUEST
    assert front.get(f"{PATH}/{response['id']}").json() == response


@pytest.mark.parametrize(
    ("at", "status"), [("response.output_item.done", 400), ("response.completed", 200)]
)
def test_a_response_can_be_continued_as_soon_as_its_client_knows_its_end(
    at: str, status: int
) -> None:
    async def go_on(http: httpx.AsyncClient, path: str) -> httpx.Response:
        key = path.rpartition("/")[2]
        return await http.post(PATH, json={"input": "more", "previous_response_id": key})

    streamed, [answer] = interrupted(front_of(reply("Hello")), at, go_on)
    assert response_of(events_of(streamed))["status"] == "completed"
    assert answer.status_code == status, answer.text
    assert status == httpx.codes.OK or error(answer)["code"] == "response_not_ended"


def test_no_item_opens_in_a_response_that_was_cancelled() -> None:
    front = front_of([delta("Hello"), finished()])
    streamed, [answer] = interrupted(front, "response.created", cancel)
    response = response_of(events_of(streamed))
    assert response == answer.json() == front.get(f"{PATH}/{response['id']}").json()
    assert (response["status"], response["output"]) == ("cancelled", [])


def test_a_response_that_is_deleted_while_it_is_computed_ends_and_is_not_kept() -> None:
    async def delete(http: httpx.AsyncClient, path: str) -> httpx.Response:
        shown = await http.get(f"{path}/input_items")
        assert [item["content"][0]["text"] for item in shown.json()["data"]] == ["hello"]
        return await http.delete(path)

    documents = Documents()
    front = Front(ScriptedRuntime(GOING_ON, answers=documents.answer))
    streamed, [answer, *_] = interrupted(front, "response.output_text.delta", delete)
    response = response_of(events_of(streamed))
    assert answer.json() == {"id": response["id"], "object": "response", "deleted": True}
    assert (response["status"], response["store"]) == ("cancelled", False)
    assert front.runtime.cancelled_turns == 1
    assert not documents.kept


@pytest.mark.parametrize(
    ("at", "status"), [("response.output_item.done", 409), ("response.completed", 200)]
)
def test_a_response_that_is_deleted_while_it_ends_is_deleted_or_asked_for_again(
    at: str, status: int
) -> None:
    streamed, [answer] = interrupted(
        front_of(reply("Hello")), at, lambda http, path: http.delete(path)
    )
    assert response_of(events_of(streamed))["status"] == "completed"
    assert answer.status_code == status


def test_references_stand_for_stored_items() -> None:
    front = front_of(calling(("look", "{}"), before=[delta("Well.")]), reply("x"))
    output = answered(front)["output"]
    items: list[Any] = [{"role": "user", "content": "hello"}]
    items += [{"type": "item_reference", "id": item["id"]} for item in output]
    items.append({"type": "function_call_output", "call_id": "call_0", "output": "seen"})
    answered(front, input=items)
    sent = front.runtime.requests[1].messages
    assert sent is not None
    assert [each["role"] for each in sent] == ["user", "assistant", "tool"]
    assert sent[1]["content"] == "Well."
    assert sent[1]["tool_calls"][0]["function"]["name"] == "look"


def test_unknown_references_are_refused_with_a_remedy() -> None:
    response = ask(front_of(), input=[{"type": "item_reference", "id": "msg_x"}])
    assert response.status_code == httpx.codes.BAD_REQUEST
    assert "send the item itself" in error(response)["message"]
    many = [{"type": "item_reference", "id": f"msg_{number:032x}0000"} for number in range(65)]
    assert "at most 64 responses" in error(ask(front_of(), input=many))["message"]
