"""A request's id: in, out with every answer, and in every line that is logged about it."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator

import pytest
from rich.console import Console

from rekindle.errors import TooManyRequests
from rekindle.http.logs import MOST_CHARACTERS, log_handler
from rekindle.protocol.events import Prefill, Started
from rekindle.protocol.frames import LogLine
from tests.api.scripted import Front, ScriptedRuntime, Step, delta, finished

FRESH = re.compile(r"req_[0-9a-f]{24}")


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """What a server writes to its log."""
    written = io.StringIO()
    handler = log_handler(Console(file=written))
    root = logging.getLogger("rekindle")
    before = root.level
    root.setLevel(logging.INFO)
    root.addHandler(handler)
    yield written
    root.removeHandler(handler)
    root.setLevel(before)


@pytest.mark.parametrize("given", ["a", "req-1.2_3:4", "0" * MOST_CHARACTERS])
def test_an_id_is_sent_back_as_it_came(given: str) -> None:
    answer = Front().chat(headers={"X-Request-Id": given})
    assert answer.headers.get_list("x-request-id") == [given]


@pytest.mark.parametrize(
    "given",
    ["", " ", "a b", "a/../b", "a\tb", "0" * (MOST_CHARACTERS + 1), "%0a", "<b>", b"\xe9", "{}"],
)
def test_an_id_that_is_not_fit_to_be_logged_is_replaced(given: str | bytes) -> None:
    answer = Front().chat(headers={"X-Request-Id": given})
    assert FRESH.fullmatch(answer.headers["x-request-id"])


def test_each_request_without_an_id_gets_one_of_its_own() -> None:
    ids = {Front().get("/health").headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3
    assert all(FRESH.fullmatch(each) for each in ids)


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/health", {}, 200),
        ("GET", "/nowhere", {}, 404),
        ("GET", "/v1/chat/completions", {}, 405),
        ("POST", "/v1/chat/completions", {"content-type": "text/plain"}, 415),
        ("POST", "/v1/chat/completions", {"content-type": "application/json"}, 400),
        ("GET", "/v1/models", {"host": "evil.example"}, 421),
        ("GET", "/v1/models", {"x-padding": "x" * 70_000}, 431),
        ("OPTIONS", "/", {"origin": "http://a", "access-control-request-method": "GET"}, 403),
    ],
)
def test_every_answer_has_the_id(
    method: str, path: str, headers: dict[str, str], status: int
) -> None:
    answer = Front().request(method, path, headers={"X-Request-Id": "abc", **headers}, content="{")
    assert (answer.status_code, answer.headers["x-request-id"]) == (status, "abc")


def test_an_error_nobody_foresaw_has_the_id_in_answer_and_log(log: io.StringIO) -> None:
    broken = delta(RuntimeError("a detail"))  # type: ignore[arg-type]
    runtime = ScriptedRuntime([Started(0, 1, 0), broken, finished()])
    answer = Front(runtime).chat(headers={"X-Request-Id": "abc"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "abc")
    assert "ERROR    [abc] unexpected error on /v1/chat/completions" in log.getvalue()


@pytest.mark.parametrize("stream", [False, True])
def test_every_line_about_a_turn_has_the_id(
    stream: bool, log: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rekindle.api.base.turns.LOG_EVERY_S", 0.0)
    script: list[Step] = [Started(0, 10, 0), Prefill(0, 5, 10), delta("x"), finished()]
    Front(ScriptedRuntime(script)).chat(stream=stream, headers={"X-Request-Id": "abc"})
    progress, end = log.getvalue().splitlines()
    assert "[abc] turn 0: 5 of 10 prompt tokens read" in progress
    assert "[abc] 10 prompt tokens: " in end


def test_a_line_that_is_about_no_request_has_none(log: io.StringIO) -> None:
    logging.getLogger("rekindle").info("it works")
    assert log.getvalue().endswith(" INFO     it works\n")


def test_a_refusal_does_not_leave_its_id_behind(log: io.StringIO) -> None:
    Front(ScriptedRuntime([TooManyRequests("full")])).chat(headers={"X-Request-Id": "abc"})
    logging.getLogger("rekindle").info("later")
    assert "abc" not in log.getvalue()


def test_a_line_of_a_runtime_has_the_id_of_the_request_it_is_about(log: io.StringIO) -> None:
    runtime = ScriptedRuntime()
    runtime._receive(LogLine("warning", "it is odd", "abc"))
    runtime._receive(LogLine("info", "it is even"))
    odd, even = log.getvalue().splitlines()
    assert odd.endswith("WARNING  [abc] it is odd")
    assert even.endswith("INFO     it is even")
