"""/health and /health/ready name what is wrong, and tell degraded states apart."""

from __future__ import annotations

import pytest

from rekindle.front.health import STUCK_AFTER_S
from rekindle.protocol.frames import Heartbeat
from tests.api.scripted import Front, ScriptedRuntime


def checked(runtime: ScriptedRuntime, path: str) -> tuple[int, str, list[str]]:
    answer = Front(runtime).get(path)
    body = answer.json()
    return answer.status_code, body["status"], [each["code"] for each in body.get("problems", [])]


def beating(working_s: float = 0.0, encoding_s: float = 0.0, disk: str = "ok") -> ScriptedRuntime:
    runtime = ScriptedRuntime()
    runtime._receive(Heartbeat(working_s, encoding_s, disk))
    return runtime


def test_a_server_without_problems_is_ok() -> None:
    for path in ("/health", "/health/ready"):
        assert checked(beating(1.0, 1.0), path) == (200, "ok", [])


@pytest.mark.parametrize("state", ["full", "failing", "locked", "hung"])
def test_a_disk_cache_that_is_off_degrades_the_server_but_it_is_ready(state: str) -> None:
    for path in ("/health", "/health/ready"):
        assert checked(beating(disk=state), path) == (200, "degraded", ["disk_cache_off"])


@pytest.mark.parametrize("state", ["ok", "off", "opening"])
def test_a_disk_cache_that_was_not_asked_for_is_no_problem(state: str) -> None:
    assert checked(beating(disk=state), "/health") == (200, "ok", [])


LONG_S = STUCK_AFTER_S + 1


def test_stuck_encoders_and_a_stuck_engine_are_different_problems() -> None:
    encoding, stepping = beating(LONG_S, LONG_S), beating(LONG_S)
    assert checked(encoding, "/health") == (200, "degraded", ["encoders_stuck"])
    assert checked(stepping, "/health") == (200, "degraded", ["engine_stuck"])
    assert checked(encoding, "/health/ready") == (503, "unavailable", ["encoders_stuck"])
    assert checked(stepping, "/health/ready") == (503, "unavailable", ["engine_stuck"])


def test_several_problems_of_a_model_are_all_named() -> None:
    found = checked(beating(LONG_S, LONG_S, "full"), "/health")
    assert found == (200, "degraded", ["encoders_stuck", "disk_cache_off"])


@pytest.mark.parametrize("path", ["/health", "/health/ready"])
def test_a_model_that_is_loading_and_one_that_failed_are_told_apart(path: str) -> None:
    runtime = ScriptedRuntime()
    runtime.supervisor.ready = None
    assert checked(runtime, path) == (503, "unavailable", ["model_loading"])
    runtime.supervisor.failed_restarts = 1
    assert checked(runtime, path) == (503, "unavailable", ["model_failed"])
