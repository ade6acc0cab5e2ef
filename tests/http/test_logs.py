from __future__ import annotations

import io
import logging
import re

import pytest
from rich.console import Console

from rekindle.http.logs import log_handler

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


def test_a_record_is_one_line_when_it_goes_to_a_file() -> None:
    first, second = logged(LONG, "[bold]as it is[/]").splitlines()
    assert re.fullmatch(rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d INFO +{re.escape(LONG)}", first)
    assert second.endswith(" [bold]as it is[/]")


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n", "\x0b", "\x1b[2J", "\x85", "\u2028"])
def test_a_text_cannot_begin_a_line_of_its_own(end: str) -> None:
    [line] = logged(f"no model a{end}12:00 ERROR forged").splitlines()
    assert line.endswith("forged")
    assert "\x1b" not in line


def test_where_an_error_came_from_follows_its_line() -> None:
    lines = logged("it failed", error=ValueError("why")).splitlines()
    assert lines[0].endswith(" it failed")
    assert lines[-1] == "ValueError: why"


def test_a_terminal_gets_lines_that_fit_it() -> None:
    assert all(len(line) <= 200 for line in logged(LONG, terminal=True).splitlines())
    assert len(logged(LONG, terminal=True).splitlines()) > 1
