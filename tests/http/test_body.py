"""Request bodies are limited per request, per caller and in total; large ones use a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import patch

import httpx
import orjson
import pytest
from starlette.types import ASGIApp, Message

from rekindle.errors import TooManyRequests
from rekindle.http import body as request_body
from rekindle.http.body import (
    LARGE_BODY_BYTES,
    LIMITS,
    PUNCTUATION,
    VALIDATORS,
    BodyLimits,
    HeldBytes,
    LimitedBody,
)
from rekindle.http.middleware import RequestMiddleware
from rekindle.protocol.events import Started
from tests.api.scripted import Front, Pause, ScriptedRuntime, error, lifespan
from tests.kvcache.measure import allocated_bytes

CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}
LARGE = "x" * LARGE_BODY_BYTES


@pytest.fixture
def few_values(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(request_body, "LIMITS", BodyLimits(punctuation=1000))
    return 1000


@pytest.mark.parametrize("mark", [chr(byte) for byte in PUNCTUATION])
def test_a_body_with_too_many_values_is_rejected_before_parsing(few_values: int, mark: str) -> None:
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
    """Concurrent requests whose turns last until the client disconnects."""

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


def test_bytes_in_flight_are_limited_per_caller_and_in_total(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = BodyLimits(held_bytes=320_000, caller_held_bytes=220_000)
    monkeypatch.setattr(request_body, "LIMITS", limits)
    runtime = ScriptedRuntime([Started(0, 10, 0), Pause()])
    front = Front(runtime, api_key=["a", "b", "c"])
    middleware: Any = front.app()
    assert isinstance(middleware, RequestMiddleware)

    async def scene() -> None:
        async with lifespan(middleware) as app:
            crowd = Crowd(app)
            crowd.post("a", 100_000)
            crowd.post("a", 100_000)
            await until_turns(runtime, 2)
            third = await crowd.post("a", 100_000)
            assert (third.status_code, third.headers["retry-after"]) == (429, "1")
            crowd.post("b", 100_000)
            await until_turns(runtime, 3)
            full = await crowd.post("c", 100_000)
            assert (full.status_code, full.headers["retry-after"]) == (503, "1")
            await crowd.leave()
        assert not middleware.held.by_caller

    asyncio.run(scene())
    assert runtime.open_turns == 0


@pytest.mark.parametrize("stream", [False, True])
def test_the_bytes_of_an_answered_request_are_released(stream: bool) -> None:
    front = Front()
    middleware: Any = front.app()

    async def scene() -> None:
        async with lifespan(middleware) as app:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
                body = {"messages": [{"role": "user", "content": "x" * 1000}], "stream": stream}
                assert (await http.post(CHAT, json=body)).status_code == 200
                assert (await http.post(CHAT, json={"messages": 3})).status_code == 400
        assert not middleware.held.by_caller

    asyncio.run(scene())


def test_other_memory_of_a_request_counts_until_it_is_answered() -> None:
    held = HeldBytes()

    async def receive() -> Message:
        return {"type": "http.request", "body": b"12345"}

    body = LimitedBody(receive, held, b"me")
    asyncio.run(body.receive())
    with body.holding(LIMITS.caller_held_bytes - 5):
        with pytest.raises(TooManyRequests), body.holding(1):
            pass
        with body.holding(1, refuses=False):
            assert held.by_caller[b"me"] == LIMITS.caller_held_bytes + 1
    body.hold(LIMITS.caller_held_bytes - 5)
    with pytest.raises(TooManyRequests):
        body.hold(1)
    body.close()
    assert not held.by_caller


def test_many_small_values_count_as_the_memory_of_the_parsed_body() -> None:
    held = HeldBytes()
    content = orjson.dumps([[] for _ in range(10_000)])

    async def receive() -> Message:
        return {"type": "http.request", "body": content}

    body = LimitedBody(receive, held, b"me")
    asyncio.run(body.receive())
    parsed: list[Any] = []
    parsed_bytes = allocated_bytes(lambda: parsed.extend(orjson.loads(content)))
    assert parsed_bytes < held.by_caller[b"me"] < 4 * parsed_bytes
    body.close()
    assert not held.by_caller


def parsed_in(front: Front, path: str, body: dict[str, Any]) -> list[str]:
    """Return the names of the threads that parse the body."""
    threads = []

    def loads(content: bytes) -> Any:
        threads.append(threading.current_thread().name)
        return orjson.loads(content)

    with patch.object(request_body, "orjson", loads=loads):
        assert front.post(path, body).status_code == 200
    return threads


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LARGE}]}),
        ("/v1/completions", {"prompt": LARGE}),
    ],
)
def test_a_large_body_is_parsed_in_a_thread(path: str, body: dict[str, Any]) -> None:
    front = Front()
    [thread] = parsed_in(front, path, body)
    assert thread.startswith(VALIDATORS)
    assert front.runtime.requested


def test_a_small_body_is_parsed_on_the_event_loop() -> None:
    body = {"messages": [{"role": "user", "content": "hello"}]}
    [thread] = parsed_in(Front(), "/v1/chat/completions", body)
    assert thread == threading.current_thread().name


@pytest.mark.parametrize("padding", ["", LARGE], ids=["small", "large"])
def test_small_and_large_bodies_get_the_same_errors(padding: str) -> None:
    message = {"role": "user", "content": padding}
    wrong = Front().chat(messages=[message], n="two")
    assert (wrong.status_code, error(wrong)["param"]) == (400, "n")
    unserved = Front().chat(messages=[message], best_of=3)
    assert error(unserved)["code"] == "unsupported_parameter"
    headers = {"content-type": "application/json"}
    no_json = Front().request(
        "POST", "/v1/completions", content=b"{" + padding.encode(), headers=headers
    )
    assert error(no_json)["message"].startswith("The body is not valid JSON: ")
