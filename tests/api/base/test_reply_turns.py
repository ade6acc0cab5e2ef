"""Turns: events that arrive together are written together, and prefill progress is reported."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import weakref
from typing import Any

import httpx
import openai
import pytest

from rekindle.api.base.reply import Reply, Turns
from rekindle.api.base.turn_record import PrefillLog
from rekindle.errors import ReportedError
from rekindle.protocol.events import Delta, Event, Prefill, Started
from rekindle.protocol.requests import GenerateRequest, SamplingParams
from tests.api.live import live
from tests.api.scripted import (
    HELLO,
    Front,
    Pause,
    ScriptedRuntime,
    Step,
    delta,
    failed,
    finished,
    reply,
)

SCRIPT: list[Step] = [
    Started(0, 2048, 0),
    Prefill(0, 512, 2048),
    Prefill(0, 2048, 2048),
    delta("x"),
    finished(),
]


def streamed(**fields: Any) -> list[str]:
    return Front(ScriptedRuntime(SCRIPT)).chat(stream=True, **fields).text.split("\n\n")


def test_progress_can_come_as_comments() -> None:
    blocks = streamed(prefill_progress="comments")
    assert blocks[:3] == [": prefill 0/2048", ": prefill 512/2048", ": prefill 2048/2048"]
    plain = streamed()
    assert len(plain) == len(blocks) - 3
    assert not any(block.startswith(":") for block in plain)


@pytest.mark.parametrize("progress", [None, False, True, "comments"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_runtime_is_asked_for_progress_when_a_stream_will_tell_it(
    progress: Any, stream: bool
) -> None:
    front = Front(ScriptedRuntime(SCRIPT))
    front.chat(stream=stream, prefill_progress=progress)
    assert front.runtime.requested.progress is bool(stream and progress)


def test_progress_is_sent_only_on_request() -> None:
    assert "prefill" not in "".join(streamed())
    assert "prefill" not in Front(ScriptedRuntime(SCRIPT)).chat().text


STREAMS = [
    ("/v1/chat/completions", {"messages": HELLO["messages"]}, ": waiting"),
    ("/v1/completions", {"prompt": "hello"}, ": waiting"),
    ("/completion", {"prompt": "hello"}, ": waiting"),
    ("/v1/messages", {"messages": HELLO["messages"], "max_tokens": 9}, "event: ping"),
    ("/v1/responses", {"input": "hello"}, "event: response.in_progress"),
    ("/api/chat", {"model": "tiny", "messages": HELLO["messages"]}, '"content":""'),
    ("/api/generate", {"model": "tiny", "prompt": "hello"}, '"response":""'),
]


@pytest.mark.parametrize("begun", [[], [Started(0, 10, 0)]], ids=["queued", "reading"])
@pytest.mark.parametrize(("path", "body", "sign"), STREAMS)
def test_a_stream_that_waits_sends_its_headers_and_signs_of_life(
    path: str, body: dict[str, Any], sign: str, begun: list[Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise proxies and clients would give up during a long prefill or in the queue."""
    monkeypatch.setattr(Reply, "keep_alive_s", 0.01)
    with (
        live(Front(ScriptedRuntime([*begun, Pause()]))) as server,
        server.client() as client,
        client.stream("POST", path, json={**body, "stream": True}) as response,
    ):
        assert response.status_code == httpx.codes.OK
        signs = (line for line in response.iter_lines() if sign in line)
        assert [next(signs) for _ in range(3)]


def test_openais_client_passes_over_comments() -> None:
    with live(Front(ScriptedRuntime(SCRIPT))) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        with (
            client,
            client.chat.completions.stream(
                model="default",
                messages=[{"role": "user", "content": "hello"}],
                extra_body={"prefill_progress": "comments"},
            ) as stream,
        ):
            final = stream.get_final_completion()
    assert final.choices[0].message.content == "x"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def lines(caplog: pytest.LogCaptureFixture, *events: tuple[float, Event]) -> list[str]:
    clock = Clock()
    prefill_log = PrefillLog(clock)
    with caplog.at_level(logging.INFO, "rekindle"):
        for clock.now, event in events:
            prefill_log.record(event)
    return [record.getMessage() for record in caplog.records]


def test_a_long_prefill_is_logged_every_five_seconds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    events = [(float(s), Prefill(12, s * 100, 9000)) for s in range(1, 13)]
    assert lines(caplog, (0.0, Started(12, 9000, 0)), *events) == [
        "turn 12: 500 of 9000 prompt tokens read",
        "turn 12: 1000 of 9000 prompt tokens read",
    ]


def test_each_turn_has_its_own_five_seconds(caplog: pytest.LogCaptureFixture) -> None:
    assert lines(
        caplog,
        (0.0, Started(1, 900, 0)),
        (4.0, Started(2, 900, 0)),
        (5.0, Prefill(1, 500, 900)),
        (5.0, Prefill(2, 100, 900)),
        (9.0, Prefill(2, 500, 900)),
    ) == ["turn 1: 500 of 900 prompt tokens read", "turn 2: 500 of 900 prompt tokens read"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stream_logs_its_prompt_before_there_is_anything_to_send(
    stream: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rekindle.api.base.turn_record.LOG_EVERY_S", 0.0)
    with caplog.at_level(logging.INFO, "rekindle"):
        Front(ScriptedRuntime(SCRIPT)).chat(stream=stream)
    first, second, last = [record.getMessage() for record in caplog.records]
    assert "512 of 2048" in first
    assert "2048 of 2048" in second
    assert "output 2" in last


async def arrived(*script: Step) -> list[list[Event]]:
    """The events of a turn all of which have come before its client reads any."""
    runtime = ScriptedRuntime(script)
    request = GenerateRequest(turn=0, prompt="x", sampling=SamplingParams(), max_tokens=None)
    turns = Turns(runtime, [request])
    await asyncio.wait(runtime.scripts)
    groups: list[list[Event]] = []
    with contextlib.suppress(ReportedError):
        while turns.open:
            groups.append([event for _, event in await turns.collect()])
    return groups


def test_events_that_have_arrived_are_collected_together() -> None:
    [events] = asyncio.run(arrived(*reply("Hel", "lo")))
    assert [type(event).__name__ for event in events] == ["Started", "Delta", "Delta", "Finished"]


def test_events_before_a_failure_are_not_lost() -> None:
    problem = failed(500, "server_error", None, "broken")
    [events] = asyncio.run(arrived(*reply("Hel", end=problem)))
    assert [type(event).__name__ for event in events] == ["Started", "Delta"]


def test_a_finished_stream_is_freed_without_the_garbage_collector() -> None:
    """It has the whole request."""

    class Stream:
        def __init__(self) -> None:
            request = GenerateRequest(
                turn=0, prompt="x", sampling=SamplingParams(), max_tokens=None
            )
            self.turns = Turns(ScriptedRuntime(SCRIPT), [request], on_delta=self.on_delta)

        def on_delta(self, _index: int, _delta: Delta) -> bool:
            return True

    async def stream() -> weakref.ref[Stream]:
        made = Stream()
        made.turns.close()
        return weakref.ref(made)

    gc.disable()
    try:
        assert asyncio.run(stream())() is None
    finally:
        gc.enable()
