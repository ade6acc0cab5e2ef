"""The bytes of a body: how many of one, of a caller's and of everybody's may be here at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import patch

import httpx
import pytest
from starlette.types import ASGIApp, Message

from rekindle.errors import TooManyRequests
from rekindle.http import body as request_body
from rekindle.http.body import PUNCTUATION, HeldBytes, LimitedBody
from rekindle.http.middleware import RequestMiddleware
from rekindle.protocol.events import Started
from tests.api.scripted import Front, Pause, ScriptedRuntime, error, lifespan

CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}


@pytest.fixture
def few_values(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(request_body, "MOST_PUNCTUATION", 1000)
    return 1000


@pytest.mark.parametrize("mark", [chr(byte) for byte in PUNCTUATION])
def test_a_body_of_too_many_values_is_refused_unparsed(few_values: int, mark: str) -> None:
    sent = 0

    async def flood() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(100):
            sent += 100
            yield mark.encode() * 100

    with patch("orjson.loads", side_effect=AssertionError("it was parsed")):
        answer = Front().request("POST", CHAT, content=flood(), headers=JSON)
    assert answer.status_code == 400
    assert error(answer)["code"] == "too_many_values"
    assert sent <= few_values + 200


class Crowd:
    """Requests whose turns last until their clients leave."""

    def __init__(self, app: ASGIApp) -> None:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://localhost")
        self._asking: list[asyncio.Task[httpx.Response]] = []

    def post(self, key: str, size_bytes: int) -> asyncio.Task[httpx.Response]:
        content = b'{"messages": [{"role": "user", "content": "hi"}]}'.ljust(size_bytes)
        headers = {"Authorization": f"Bearer {key}", **JSON}
        asking = asyncio.create_task(self.http.post(CHAT, content=content, headers=headers))
        self._asking.append(asking)
        return asking

    async def leave(self) -> None:
        for asking in self._asking:
            asking.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)
        await self.http.aclose()


async def until_turns(runtime: ScriptedRuntime, count: int) -> None:
    async with asyncio.timeout(30):
        while runtime.open_turns < count:
            await asyncio.sleep(0)


def test_bytes_in_flight_are_bounded_for_each_caller_and_in_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_body, "MOST_HELD_BYTES_OF_ONE", 2000)
    monkeypatch.setattr(request_body, "MOST_HELD_BYTES", 3000)
    runtime = ScriptedRuntime([Started(0, 10, 0), Pause()])
    front = Front(runtime, api_key=["a", "b", "c"])
    middleware: Any = front.app()
    assert isinstance(middleware, RequestMiddleware)

    async def scene() -> None:
        async with lifespan(middleware) as app:
            crowd = Crowd(app)
            crowd.post("a", 1000)
            crowd.post("a", 1000)
            await until_turns(runtime, 2)
            third = await crowd.post("a", 1000)
            assert (third.status_code, third.headers["retry-after"]) == (429, "1")
            crowd.post("b", 1000)
            await until_turns(runtime, 3)
            full = await crowd.post("c", 1000)
            assert (full.status_code, full.headers["retry-after"]) == (503, "1")
            await crowd.leave()
        assert middleware.held.is_empty

    asyncio.run(scene())
    assert runtime.open_turns == 0


@pytest.mark.parametrize("stream", [False, True])
def test_what_was_answered_is_held_no_longer(stream: bool) -> None:
    front = Front()
    middleware: Any = front.app()

    async def scene() -> None:
        async with lifespan(middleware) as app:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
                body = {"messages": [{"role": "user", "content": "x" * 1000}], "stream": stream}
                assert (await http.post(CHAT, json=body)).status_code == 200
                assert (await http.post(CHAT, json={"messages": 3})).status_code == 400
        assert middleware.held.is_empty

    asyncio.run(scene())


def test_what_is_kept_beside_a_body_counts_until_the_answer_is_sent() -> None:
    held = HeldBytes()

    async def receive() -> Message:
        return {"type": "http.request", "body": b"12345"}

    body = LimitedBody(receive, held, b"me")
    asyncio.run(body.receive())
    body.hold(request_body.MOST_HELD_BYTES_OF_ONE - 5)
    with pytest.raises(TooManyRequests):
        body.hold(1)
    body.close()
    assert held.is_empty
