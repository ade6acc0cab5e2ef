"""GET /v1/internal/live."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import orjson
import pytest

from rekindle.api.base.admin import AdminClient
from rekindle.api.base.models import ServedModels
from rekindle.api.cache import live
from rekindle.api.cache.live import LiveFeed
from rekindle.config import Config
from rekindle.errors import TooManyRequests
from rekindle.protocol.admin import GetStats
from rekindle.protocol.events import Delta, Started, TextDelta
from rekindle.worker.client import OpenTurns
from tests.api.cache.entries import answering, stats
from tests.api.scripted import ScriptedRuntime

A, B = AdminClient(b"a"), AdminClient(b"b")
ADMIN = AdminClient(b"root", is_admin=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "INTERVAL_S", 0.01)


class Watched:
    """A server with one model, and its feed."""

    def __init__(self) -> None:
        self.runtime = ScriptedRuntime(answers=answering(stats()))
        self.models = ServedModels(Config(), [self.runtime])
        self.turns = OpenTurns(10, self.runtime.activity)
        self.feed = LiveFeed()

    def watch(self, client: AdminClient) -> AsyncGenerator[bytes, None]:
        return self.feed.watch(self.models, client)


def decoded(event: bytes) -> dict[str, Any]:
    name, data = event.removesuffix(b"\n\n").split(b"\n")
    assert name == b"event: snapshot"
    return dict(orjson.loads(data.removeprefix(b"data: ")))


async def first(watched: Watched, client: AdminClient) -> dict[str, Any]:
    async with aclosing(watched.watch(client)) as events:
        return decoded(await anext(events))


def test_a_snapshot_has_the_state_of_every_model() -> None:
    snapshot = asyncio.run(first(Watched(), ADMIN))
    [model] = snapshot["models"]
    assert snapshot["problem"] is None
    assert (model["id"], model["status"], model["generates"]) == ("tiny", "loaded", True)
    assert model["cache"]["ram_bytes"] == 1000


def test_a_tenant_sees_its_own_turns_and_an_admin_all() -> None:
    async def check() -> None:
        watched = Watched()
        watched.turns.add(1, b"a", lambda _event: None)
        assert len((await first(watched, A))["models"][0]["running"]) == 1
        assert len((await first(watched, B))["models"][0]["running"]) == 0
        assert len((await first(watched, ADMIN))["models"][0]["running"]) == 1

    asyncio.run(check())


def test_no_text_of_a_conversation_is_sent() -> None:
    async def check() -> None:
        watched = Watched()
        watched.turns.add(1, b"a", lambda _event: None)
        watched.turns.deliver(Started(1, 5, 0, prompt="secret words"))
        watched.turns.deliver(Delta(1, TextDelta("secret words")))
        assert "secret" not in str(await first(watched, ADMIN))

    asyncio.run(check())


def test_a_snapshot_is_sent_when_something_has_changed() -> None:
    async def check() -> None:
        watched = Watched()
        async with aclosing(watched.watch(A)) as events:
            await anext(events)
            following = asyncio.ensure_future(anext(events))
            for _ in range(20):
                await asyncio.sleep(live.INTERVAL_S)
            assert not following.done()
            watched.turns.add(1, b"a", lambda _event: None)
            assert decoded(await following)["models"][0]["running"]

    asyncio.run(check())


def test_everybody_with_the_same_rights_shares_the_questions_to_the_model() -> None:
    async def check() -> None:
        watched = Watched()
        watchers = [watched.watch(ADMIN) for _ in range(10)]
        await asyncio.gather(*map(anext, watchers))
        asked = [each.op for each in watched.runtime.admin_requests]
        assert len([op for op in asked if isinstance(op, GetStats)]) == 1
        for watcher in watchers:
            await watcher.aclose()

    asyncio.run(check())


def test_a_model_that_does_not_answer_is_still_shown() -> None:
    watched = Watched()
    watched.runtime.supervisor.ready = None
    snapshot = asyncio.run(first(watched, ADMIN))
    assert snapshot["problem"]
    [model] = snapshot["models"]
    assert model["reason"]
    assert model["cache"] is None


def test_the_number_of_watchers_is_limited_for_each_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_WATCHERS", 2)

    async def check() -> None:
        watched = Watched()
        watchers = [watched.watch(A), watched.watch(A)]
        await asyncio.gather(*map(anext, watchers))
        with pytest.raises(TooManyRequests):
            watched.feed.check_room(A)
        watched.feed.check_room(B)
        for watcher in watchers:
            await watcher.aclose()
        watched.feed.check_room(A)

    asyncio.run(check())
