"""A log record is one line, and carries the id of its request, as does every response."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rekindle.errors import ConfigError, TooManyRequests
from rekindle.http.logs import PROGRESS_LOG, LogFile, log_handler
from rekindle.protocol.events import Prefill, Started
from rekindle.protocol.frames import LogLine
from tests.api.scripted import Front, ScriptedRuntime, Step, delta, finished, reply

CHAT = "/v1/chat/completions"

FRESH_ID = re.compile(r"req_[0-9a-f]{24}")
LONG = "turn 1: hit, " + ", ".join(f"reused {number} of 4096 prompt tokens" for number in range(9))


def logged(*messages: str, terminal: bool = False, error: Exception | None = None) -> str:
    file = io.StringIO()
    handler = log_handler(Console(file=file, width=80, force_terminal=terminal))
    for message in messages:
        record = logging.LogRecord("rekindle", logging.INFO, "", 0, message, None, None)
        if error is not None:
            record.exc_info = (type(error), error, error.__traceback__)
        handler.handle(record)
    return file.getvalue()


def test_a_record_is_one_line_in_a_file() -> None:
    first, second = logged(LONG, "[bold]as it is[/]").splitlines()
    assert re.fullmatch(rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d INFO +{re.escape(LONG)}", first)
    assert second.endswith(" [bold]as it is[/]")


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n", "\x0b", "\x1b[2J", "\x85", "\u2028"])
def test_a_message_cannot_forge_a_second_line(end: str) -> None:
    [line] = logged(f"no model a{end}12:00 ERROR forged").splitlines()
    assert line.endswith("forged")
    assert "\x1b" not in line


def test_a_traceback_follows_its_line() -> None:
    lines = logged("it failed", error=ValueError("why")).splitlines()
    assert lines[0].endswith(" it failed")
    assert lines[-1] == "ValueError: why"


def test_lines_wrap_in_a_terminal() -> None:
    assert all(len(line) <= 200 for line in logged(LONG, terminal=True).splitlines())
    assert len(logged(LONG, terminal=True).splitlines()) > 1


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """The text of a server's log."""
    written = io.StringIO()
    handler = log_handler(Console(file=written))
    root = logging.getLogger("rekindle")
    before = root.level
    root.setLevel(logging.INFO)
    root.addHandler(handler)
    yield written
    root.removeHandler(handler)
    root.setLevel(before)


@pytest.mark.parametrize("given", ["a", "req-1.2_3:4", "0" * 128])
def test_a_valid_request_id_is_returned(given: str) -> None:
    answer = Front().chat(headers={"X-Request-Id": given})
    assert answer.headers.get_list("x-request-id") == [given]


@pytest.mark.parametrize(
    "given",
    ["", " ", "a b", "a/../b", "a\tb", "0" * 129, "%0a", "<b>", b"\xe9", "{}"],
)
def test_an_unsafe_request_id_is_replaced(given: str | bytes) -> None:
    answer = Front().chat(headers={"X-Request-Id": given})
    assert FRESH_ID.fullmatch(answer.headers["x-request-id"])


def test_a_request_without_an_id_gets_a_fresh_one() -> None:
    ids = {Front().get("/health").headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3
    assert all(FRESH_ID.fullmatch(each) for each in ids)


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/health", {}, 200),
        ("GET", "/nowhere", {}, 404),
        ("GET", "/v1/completions", {}, 405),
        ("POST", "/v1/chat/completions", {"content-type": "text/plain"}, 415),
        ("POST", "/v1/chat/completions", {"content-type": "application/json"}, 400),
        ("GET", "/v1/models", {"host": "evil.example"}, 421),
        ("GET", "/v1/models", {"x-padding": "x" * 70_000}, 431),
        ("OPTIONS", "/", {"origin": "http://a", "access-control-request-method": "GET"}, 200),
    ],
)
def test_every_response_has_the_request_id(
    method: str, path: str, headers: dict[str, str], status: int
) -> None:
    answer = Front().request(method, path, headers={"X-Request-Id": "abc", **headers}, content="{")
    assert (answer.status_code, answer.headers["x-request-id"]) == (status, "abc")


def test_an_unexpected_error_has_the_id_in_response_and_log(log: io.StringIO) -> None:
    broken = delta(RuntimeError("a detail"))  # type: ignore[arg-type]
    runtime = ScriptedRuntime([Started(0, 1, 0), broken, finished()])
    answer = Front(runtime).chat(headers={"X-Request-Id": "abc"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "abc")
    assert "ERROR    [abc] unexpected error on /v1/chat/completions" in log.getvalue()


@pytest.mark.parametrize("stream", [False, True])
def test_every_line_about_a_turn_has_the_id(
    stream: bool, log: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rekindle.api.base.turn_record.LOG_EVERY_S", 0.0)
    monkeypatch.setattr(logging.getLogger(), "level", logging.DEBUG)
    script: list[Step] = [Started(0, 10, 0), Prefill(0, 5, 10), delta("x"), finished()]
    Front(ScriptedRuntime(script)).chat(stream=stream, headers={"X-Request-Id": "abc"})
    progress, end = log.getvalue().splitlines()
    assert "[abc] turn 0: 5 of 10 prompt tokens read" in progress
    assert "[abc] tiny POST /v1/chat/completions 200: prompt 10 " in end


def test_a_line_outside_a_request_has_no_id(log: io.StringIO) -> None:
    logging.getLogger("rekindle").info("it works")
    assert log.getvalue().endswith(" INFO     it works\n")


def test_a_rejected_request_does_not_leave_its_id_behind(log: io.StringIO) -> None:
    Front(ScriptedRuntime([TooManyRequests("full")])).chat(headers={"X-Request-Id": "abc"})
    logging.getLogger("rekindle").info("later")
    refusal, later = log.getvalue().splitlines()
    assert "[abc] tiny POST /v1/chat/completions 429: queue_full" in refusal
    assert "abc" not in later


def test_a_log_line_of_a_runtime_has_the_id_of_its_request(log: io.StringIO) -> None:
    runtime = ScriptedRuntime()
    runtime._receive(LogLine("warning", "it is odd", "abc"))
    runtime._receive(LogLine("info", "it is even"))
    odd, even = log.getvalue().splitlines()
    assert odd.endswith("WARNING  [abc] it is odd")
    assert even.endswith("INFO     it is even")


def json_lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@contextmanager
def logging_to(handler: logging.Handler) -> Iterator[logging.Logger]:
    root = logging.getLogger("rekindle")
    before = root.level
    root.setLevel(logging.INFO)
    root.addHandler(handler)
    try:
        yield root
    finally:
        root.removeHandler(handler)
        root.setLevel(before)
        handler.close()


def test_a_request_is_one_json_object() -> None:
    file = io.StringIO()
    with logging_to(log_handler(Console(file=file), "json")):
        Front(ScriptedRuntime(reply("Hel", "lo"))).chat(headers={"X-Request-Id": "abc"})
    [line] = json_lines(file.getvalue())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
    assert (line["level"], line["logger"], line["request_id"]) == (
        "info",
        "rekindle.request",
        "abc",
    )
    assert (line["model"], line["endpoint"], line["status"]) == ("tiny", CHAT, 200)
    assert (line["prompt_tokens"], line["output_tokens"], line["finish_reason"]) == (10, 2, "stop")
    assert isinstance(line["total_s"], float)


def test_json_lines_stay_lines_and_carry_tracebacks() -> None:
    file = io.StringIO()
    with logging_to(log_handler(Console(file=file, force_terminal=True), "json")) as log:
        log.error("a\nb\u2028c %s", "\x1b[2J", exc_info=ValueError("why"))
    [line] = json_lines(file.getvalue())
    assert line["message"] == "a\nb\u2028c \x1b[2J"
    assert "ValueError: why" in line["traceback"]
    assert file.getvalue().isascii()


def test_progress_is_for_a_terminal_or_for_debugging(monkeypatch: pytest.MonkeyPatch) -> None:
    def written(*, terminal: bool, level: int) -> str:
        monkeypatch.setattr(logging.getLogger(), "level", level)
        file = io.StringIO()
        with logging_to(log_handler(Console(file=file, force_terminal=terminal))):
            logging.getLogger(PROGRESS_LOG).info("half of the prompt is read")
        return file.getvalue()

    assert "half" in written(terminal=True, level=logging.INFO)
    assert "half" in written(terminal=False, level=logging.DEBUG)
    assert written(terminal=False, level=logging.INFO) == ""


def test_a_full_log_file_is_replaced_and_five_old_ones_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "rekindle.log"
    with logging_to(LogFile(path, 100)) as log:
        for number in range(20):
            log.info("line %d %s", number, "x" * 80)
    files = sorted(each.name for each in path.parent.iterdir())
    assert files == ["rekindle.log", *(f"rekindle.log.{number}" for number in range(1, 6))]
    assert "line 19" in path.read_text()
    assert "line 18" in path.with_name("rekindle.log.1").read_text()
    assert all(each.stat().st_mode & 0o777 == 0o600 for each in path.parent.iterdir())


def test_a_log_file_that_was_moved_is_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "rekindle.log"
    with logging_to(LogFile(path, 0)) as log:
        log.info("first")
        path.rename(tmp_path / "moved.log")
        log.info("second")
        path.unlink()
        log.info("third")
    assert (tmp_path / "moved.log").read_text() == "first\n"
    assert path.read_text() == "third\n"


def test_a_log_file_that_cannot_be_written_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--log-file.*Choose a file in a folder"):
        LogFile(tmp_path / "file" / "rekindle.log", 0)
