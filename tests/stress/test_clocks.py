"""A wall clock that jumps by a year costs no state and no answer, on the running server or between
two runs of it."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.stress.test_overload import gauge
from tests.stress.test_server import QUESTIONS, Talk, flags, get, post
from tests.support.jumping_clock import JumpingClock
from tests.support.rounds import rounds
from tests.support.server import STOP_S, Server, running
from tests.support.tiny import write_llama

YEAR_S = 365 * 24 * 3600
JUMPS_S = (YEAR_S, -YEAR_S)
RANDOM_JUMPS = rounds(0, 2)
TOLERANCE_S = 600  # of a slow machine; a jump is far longer
TTL_S = 900

Json = dict[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", context=8192)


@pytest.fixture
def clock(tmp_path: Path) -> JumpingClock:
    return JumpingClock(tmp_path)


def prepare(server: Server) -> str:
    """An entry with a lifetime that is far shorter than a jump."""
    body = {"messages": [{"role": "system", "content": "Be brief. " * 20}], "ttl": TTL_S}
    key: str = post(server, "/v1/cache/prepare", body)["cache_key"]
    return key


def respond(server: Server, **more: Any) -> Json:
    body = {"input": "Remember this.", "max_output_tokens": 16, "temperature": 0, **more}
    return post(server, "/v1/responses", body)


def is_at(moment_s: float, shift_s: int) -> bool:
    """Whether a time that the server wrote is by the clock that it sees."""
    return abs(moment_s - (time.time() + shift_s)) < TOLERANCE_S


def streamed(server: Server, jump: Callable[[], None]) -> Json:
    """The usage of a stream during which the clock jumps."""
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 64, "stream": True,
            "ignore_eos": True, "stream_options": {"include_usage": True}}  # fmt: skip
    chunks: list[Json] = []
    with (
        server.client() as client,
        client.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunks.append(json.loads(line.removeprefix("data: ")))
            if len(chunks) == 2:
                jump()
    usage: Json = chunks[-1]["usage"]
    return usage


def random_jumps_s() -> list[int]:
    chance = Random(12)
    return [chance.randint(-10 * YEAR_S, 10 * YEAR_S) for _ in range(RANDOM_JUMPS)]


@pytest.mark.long
def test_a_running_server_does_not_notice_that_its_clock_jumps(
    model: Path, tmp_path: Path, clock: JumpingClock
) -> None:
    talk = Talk()
    with running(model, tmp_path, *flags(tmp_path), environment=clock.environment) as server:
        talk.ask(server, QUESTIONS[0])
        key, response = prepare(server), respond(server)
        for turn, shift_s in enumerate((*JUMPS_S, *random_jumps_s(), 0), start=1):
            usage = streamed(server, partial(clock.jump_to, shift_s))
            assert usage["completion_tokens"] == 64
            assert 0 <= usage["prompt_eval_time"] < TOLERANCE_S
            before = talk.usage["prompt_tokens"] + talk.usage["completion_tokens"]
            told = talk.ask(server, QUESTIONS[turn])
            assert is_at(told["created"], shift_s)
            assert talk.reused_tokens == before - 1
            entry = get(server, f"/v1/cache/{key}")
            assert 0 < entry["expires_at"] - (time.time() + shift_s) <= TTL_S
            with server.client() as client:
                assert client.post("/v1/cache/gc").json()["removed"] == 0
                assert gauge(client, "watchdog_fired_total") == 0
                assert gauge(client, "runtime_restarts_total") == 0
            after = respond(server, previous_response_id=response["id"])
            assert is_at(after["created_at"], shift_s)
        clock.jump_to(YEAR_S)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(STOP_S) == 0
    assert "Traceback" not in server.log.read_text()


@pytest.mark.parametrize("jump_s", JUMPS_S, ids=["forward", "backward"])
def test_conversations_and_responses_survive_a_restart_with_another_time(
    model: Path, tmp_path: Path, clock: JumpingClock, jump_s: int
) -> None:
    """After a restart only the wall clock tells how old an entry is, and it may be wrong. An entry
    therefore lives for at least some minutes."""
    talk = Talk()
    with running(model, tmp_path, *flags(tmp_path), environment=clock.environment) as server:
        talk.go_through(server, QUESTIONS[:2])
        key, response = prepare(server), respond(server)
    before = talk.usage["prompt_tokens"] + talk.usage["completion_tokens"]
    clock.jump_to(jump_s)
    with running(model, tmp_path, *flags(tmp_path), environment=clock.environment) as server:
        talk.ask(server, QUESTIONS[2])
        assert (talk.tier, talk.reused_tokens) == ("disk", before - 1)
        entry = get(server, f"/v1/cache/{key}")
        assert 0 < entry["expires_at"] - (time.time() + jump_s) <= TTL_S
        assert get(server, f"/v1/responses/{response['id']}")["output"] == response["output"]
        assert respond(server, previous_response_id=response["id"])["status"] != "failed"
    assert "Traceback" not in server.log.read_text()
