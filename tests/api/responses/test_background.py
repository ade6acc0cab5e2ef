"""Background responses: polled, streamed, left, resumed, cancelled, and found after a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import openai
import pytest

from rekindle.api.responses import background
from rekindle.protocol.events import Started
from tests.api.live import live, soon
from tests.api.responses.asking import PATH, Documents, Stepwise, ask, runtime_of
from tests.api.responses.published import check_event, check_response
from tests.api.responses.stream_grammar import events_of
from tests.api.scripted import (
    Front,
    Pause,
    Script,
    ScriptedRuntime,
    delta,
    error,
    failed,
    finished,
    reply,
)

ASK: dict[str, Any] = {"model": "tiny", "input": "hello", "background": True}
ENDLESS: Script = [Started(0, 10, 0), delta("one, "), Pause()]
DIED: Script = [Started(0, 10, 0), delta("x"), failed(503, "server_error", "server_error", "died")]


Scene = Callable[[openai.AsyncOpenAI], Awaitable[Any]]


def played(front: Front, scene: Scene) -> Any:
    """Run a scene with OpenAI's client against a running server."""

    async def play(url: str) -> Any:
        async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:
            return await scene(client)

    with live(front) as server:
        result = asyncio.run(play(f"{server.url}/v1"))
        soon(server.is_idle)
    return result


async def ended(client: openai.AsyncOpenAI, key: str) -> Any:
    """Poll until the response has ended."""
    while (response := await client.responses.retrieve(key)).status in ("queued", "in_progress"):
        await asyncio.sleep(0.01)
    return response


def test_a_background_response_is_answered_at_once_and_polled() -> None:
    runtime = Stepwise([Pause(), Started(0, 10, 0), delta("Hel"), delta("lo"), finished()])

    async def scene(client: openai.AsyncOpenAI) -> None:
        queued = await client.responses.create(**ASK)
        assert (queued.status, queued.background, queued.output) == ("queued", True, [])
        assert (await client.responses.retrieve(queued.id)).status == "queued"
        assert queued.completed_at is None
        runtime.may_continue.set()
        response = await ended(client, queued.id)
        assert (response.status, response.output_text) == ("completed", "Hello")
        assert response.background
        check_response(response.model_dump(mode="json"))
        more = await client.responses.create(**{**ASK, "previous_response_id": queued.id})
        await ended(client, more.id)

    played(Front(runtime), scene)
    sent = runtime.requests[1].messages or []
    assert [each["content"] for each in sent] == ["hello", "Hello", "hello"]


def test_a_response_in_progress_shows_its_items_and_cannot_be_continued() -> None:
    async def scene(client: openai.AsyncOpenAI) -> None:
        queued = await client.responses.create(**ASK)
        while (await client.responses.retrieve(queued.id)).status == "queued":
            await asyncio.sleep(0.01)
        with pytest.raises(openai.BadRequestError, match="still being computed"):
            await client.responses.create(**{**ASK, "previous_response_id": queued.id})
        cancelled = await client.responses.cancel(queued.id)
        assert (cancelled.status, cancelled.output_text) == ("cancelled", "one, ")
        assert await client.responses.cancel(queued.id) == cancelled
        assert await client.responses.retrieve(queued.id) == cancelled

    played(Front(runtime_of(ENDLESS)), scene)


@pytest.mark.parametrize("has_log", [True, False])
def test_a_stream_that_was_left_continues_and_can_be_resumed(
    monkeypatch: pytest.MonkeyPatch, has_log: bool
) -> None:
    """The events come again with their numbers. Once they are forgotten, the last one comes."""
    if not has_log:
        monkeypatch.setattr(background, "MAX_ENDED_BYTES", 0)
    runtime = Stepwise([Started(0, 10, 0), delta("a"), delta("b"), Pause(), delta("c"), finished()])

    async def scene(client: openai.AsyncOpenAI) -> None:
        first = list[Any]()
        async for event in await client.responses.create(**ASK, stream=True):
            first.append(event)
            if event.type == "response.output_text.delta":
                break  # which closes the connection
        key = first[0].response.id
        runtime.may_continue.set()
        await ended(client, key)
        again = await client.responses.retrieve(
            key, stream=True, starting_after=first[-1].sequence_number
        )
        rest = [event async for event in again]
        whole = [event async for event in await client.responses.retrieve(key, stream=True)]
        for event in (*first, *rest, *whole):
            check_event(event.model_dump(mode="json"))
        assert rest[-1].type == "response.completed"
        assert rest[-1].response.output_text == "abc"
        told = [event.sequence_number for event in (*first, *rest)]
        assert told == sorted(set(told))
        if has_log:
            assert [*first, *rest] == whole
            types = [event.type for event in whole[:3]]
            assert types == ["response.created", "response.queued", "response.in_progress"]
            texts = [each.delta for each in whole if each.type == "response.output_text.delta"]
            assert texts == ["a", "b", "c"]
            assert told == list(range(len(whole)))
        else:
            assert [event.type for event in rest] == ["response.completed"]
            assert [event.sequence_number for event in whole] == list(range(len(whole)))

    played(Front(runtime), scene)


def test_several_clients_follow_one_response_while_it_is_computed() -> None:
    runtime = Stepwise([Started(0, 10, 0), delta("a"), Pause(), delta("b"), finished()])

    async def scene(client: openai.AsyncOpenAI) -> None:
        queued = await client.responses.create(**ASK)

        async def follow() -> list[Any]:
            stream = await client.responses.retrieve(queued.id, stream=True)
            return [event async for event in stream]

        followers = [asyncio.create_task(follow()) for _ in range(3)]
        while (await client.responses.retrieve(queued.id)).status == "queued":
            await asyncio.sleep(0.01)
        runtime.may_continue.set()
        one, *others = await asyncio.gather(*followers)
        assert one[-1].response.output_text == "ab"
        assert all(other == one for other in others)

    played(Front(runtime), scene)


def test_a_failure_is_stored_and_ends_the_stream() -> None:
    async def scene(client: openai.AsyncOpenAI) -> None:
        told = [event async for event in await client.responses.create(**ASK, stream=True)]
        assert told[-1].type == "response.failed"
        response = await client.responses.retrieve(told[0].response.id)
        assert response.status == "failed"
        assert response.error is not None
        assert response.error.message == "died"

    played(Front(runtime_of(DIED)), scene)


def test_a_deleted_response_ends_and_is_gone() -> None:
    documents = Documents()

    async def scene(client: openai.AsyncOpenAI) -> None:
        queued = await client.responses.create(**ASK)
        await client.responses.delete(queued.id)
        for stream in (False, True):
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(queued.id, stream=stream)

    front = Front(ScriptedRuntime(ENDLESS, answers=documents.answer))
    played(front, scene)
    assert front.runtime.cancelled_turns == 1
    assert not documents.kept


def test_a_response_that_a_stopped_server_left_has_failed() -> None:
    """What is stored first says `queued`; nobody computes it after a restart."""
    documents = Documents()

    async def scene(client: openai.AsyncOpenAI) -> Any:
        return await client.responses.create(**ASK)

    async def later(client: openai.AsyncOpenAI) -> None:
        response = await client.responses.retrieve(queued.id)
        assert response.status == "failed"
        assert response.error is not None
        assert "create it again" in response.error.message
        stream = await client.responses.retrieve(queued.id, stream=True, starting_after=7)
        [last] = [event async for event in stream]
        assert (last.type, last.sequence_number) == ("response.failed", 8)

    async def play(url: str) -> Any:
        async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:
            return await scene(client)

    with live(Front(ScriptedRuntime(ENDLESS, answers=documents.answer))) as server:
        queued = asyncio.run(play(f"{server.url}/v1"))
    assert server.runtime.cancelled_turns == 1, "the server stops what it computes"
    played(Front(ScriptedRuntime(answers=documents.answer)), later)


def test_a_background_response_has_to_be_stored() -> None:
    front = Front(runtime_of())
    refusal = ask(front, background=True, store=False)
    assert refusal.status_code == httpx.codes.BAD_REQUEST
    assert error(refusal)["param"] == "store"
    full = Front(ScriptedRuntime(ENDLESS, answers=Documents(has_room=False).answer))
    refusal = ask(full, background=True)
    assert refusal.status_code == httpx.codes.INSUFFICIENT_STORAGE
    assert error(refusal)["code"] == "response_too_large"
    assert full.runtime.cancelled_turns == 1


def test_a_response_that_is_not_in_the_background_ends_with_its_client() -> None:
    front = Front(runtime_of(reply("Hello")))
    told = [each.json for each in events_of(ask(front, stream=True))]
    assert not told[-1]["response"]["background"]
    refusal = front.get(f"{PATH}/{told[-1]['response']['id']}?stream=true")
    assert refusal.status_code == httpx.codes.BAD_REQUEST
    assert "`background: true`" in error(refusal)["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_ignored_fields_are_named_in_the_headers(stream: bool) -> None:
    with live(Front(runtime_of())) as server, server.client() as http:
        answer = http.post(PATH, json={**ASK, "stream": stream, "service_tier": "flex"})
        soon(server.is_idle)
    assert answer.headers["x-ignored-fields"] == "service_tier"
