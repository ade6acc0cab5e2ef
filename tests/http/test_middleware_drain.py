"""After a signal to stop, requests in flight may finish and new ones are refused."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from tests.api.live import live, soon
from tests.api.scripted import (
    HELLO,
    Front,
    Pause,
    ScriptedRuntime,
    Step,
    delta,
    error,
    events,
    finished,
)

CHAT = "/v1/chat/completions"
STREAM = {**HELLO, "stream": True}
HELD: list[Step] = [delta("Hel"), Pause(), delta("lo"), finished()]


def test_a_reply_in_flight_finishes_while_new_requests_are_refused() -> None:
    released = asyncio.Event()

    class Held(ScriptedRuntime):
        async def paused(self) -> None:
            await released.wait()

    with live(Front(Held(HELD))) as server, server.client() as early, server.client() as late:
        with early.stream("POST", CHAT, json=STREAM) as stream:
            lines = stream.iter_text()
            text = next(lines)
            server.signal()
            for path in ("/health", "/v1/models"):
                refused = late.get(path)
                assert refused.status_code == 503
                assert refused.headers["retry-after"]
                assert refused.headers["x-request-id"]
                assert "stopping" in error(refused)["message"]
            assert late.post(CHAT, json=HELLO).status_code == 503
            server.call(released.set)
            text += "".join(lines)
        assert events(text)[-1].data == "[DONE]"
        assert "error" not in text
        soon(lambda: server.has_ended)


def test_the_second_signal_ends_twenty_streams_with_an_error_and_without_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    front = Front(ScriptedRuntime(HELD))
    with live(front, drain_timeout_s=600) as server, ExitStack() as stack:
        streams = [
            stack.enter_context(
                stack.enter_context(server.client()).stream("POST", CHAT, json=STREAM)
            )
            for _ in range(20)
        ]
        texts = [stream.iter_text() for stream in streams]
        begun = [next(text) for text in texts]
        server.signal()
        server.signal()
        ends = [first + "".join(rest) for first, rest in zip(begun, texts, strict=True)]
        soon(lambda: server.has_ended)
    for text in ends:
        *_, last, done = events(text.replace(": waiting\n\n", ""))  # signs of life
        assert last.json["error"]["code"] == "unavailable"
        assert done.data == "[DONE]"
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_request_without_a_stream_gets_an_error_when_the_time_is_over() -> None:
    front = Front(ScriptedRuntime(HELD))
    with live(front, drain_timeout_s=600) as server, ThreadPoolExecutor() as pool:
        client = server.client()
        asked = pool.submit(client.post, CHAT, json=HELLO)
        soon(lambda: server.runtime.open_turns > 0)
        server.signal()
        server.signal()
        assert asked.result().status_code == 503
        assert "stopping" in error(asked.result())["message"]
        client.close()


def test_an_idle_server_exits_immediately() -> None:
    with live(Front()) as server:
        server.signal()
        soon(lambda: server.has_ended)


def test_a_reply_that_outlasts_the_deadline_ends_with_an_error() -> None:
    front = Front(ScriptedRuntime(HELD))
    with live(front, drain_timeout_s=0.3) as server, server.client() as client:
        with client.stream("POST", CHAT, json=STREAM) as stream:
            server.signal()
            found = events("".join(stream.iter_text()))
        assert found[-2].json["error"]["code"] == "unavailable"
        assert found[-1].data == "[DONE]"
        soon(lambda: server.has_ended)
        assert server.runtime.open_turns == 0
