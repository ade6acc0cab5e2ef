"""Stored history counts as memory in flight while a request uses it."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from rekindle.http import body as http_body
from rekindle.http.body import BodyLimits
from tests.api.responses.asking import Documents, front_of
from tests.api.scripted import Front, ScriptedRuntime, lifespan
from tests.kvcache.measure import peak_bytes


def test_loaded_history_counts_as_memory_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of 100 bytes that continue a long conversation are refused beyond the limit."""
    history = 1 << 20
    monkeypatch.setattr(http_body, "LIMITS", BodyLimits(caller_held_bytes=8 * history))
    front = Front(ScriptedRuntime(answers=Documents().answer))
    statuses: list[int] = []

    async def scene() -> None:
        async with lifespan(front.app()) as app:
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
                asked = {"input": "x" * history, "model": "tiny"}
                first = (await http.post("/v1/responses", json=asked)).json()
                more = {"input": "go on", "previous_response_id": first["id"], "store": False}
                some = (http.post("/v1/responses", json=more) for _ in range(16))
                statuses.extend(each.status_code for each in await asyncio.gather(*some))
                again = await http.post("/v1/responses", json=more)  # the others are answered
                statuses.append(again.status_code)

    assert peak_bytes(lambda: asyncio.run(scene())) < 40 * history
    assert statuses.count(200) >= 4
    assert statuses.count(429) >= 8
    assert statuses[-1] == 200


@pytest.mark.parametrize("kind", ["previous_response_id", "conversation"])
def test_the_memory_of_history_is_given_back(kind: str) -> None:
    app: Any = front_of().app()

    async def scene() -> None:
        async with lifespan(app) as started:
            transport = httpx.ASGITransport(started, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
                made = (await http.post("/v1/conversations", json={})).json()
                first = (await http.post("/v1/responses", json={"input": "x" * 1000})).json()
                named = first if kind == "previous_response_id" else made
                asked = {"input": "go on", kind: named["id"]}
                for _ in range(3):
                    assert (await http.post("/v1/responses", json=asked)).status_code == 200
                items = f"/v1/conversations/{made['id']}/items"
                hello = {"items": [{"role": "user", "content": "hello"}]}
                assert (await http.post(items, json=hello)).status_code == 200

    asyncio.run(scene())
    assert not app.held.by_caller


def test_an_answer_is_added_to_its_conversation_even_when_memory_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_body, "LIMITS", BodyLimits(caller_held_bytes=30_000))
    documents = Documents()
    front = Front(ScriptedRuntime(answers=documents.answer))
    long = {"items": [{"role": "user", "content": "x" * 10_000}]}
    made = front.post("/v1/conversations", long).json()
    answer = front.post("/v1/responses", {"input": "go on", "conversation": made["id"]}).json()
    assert answer["conversation"] == {"id": made["id"]}
    assert b"Hello" in documents.kept[made["id"]]
