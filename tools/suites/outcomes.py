"""A pytest plugin for llama.cpp's server tests: no downloads, time to start, a line per outcome.

It runs in the environment of the tests, next to their `utils.py`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

START_S = 180  # for a server, on a machine that does other work
OUTCOMES_VARIABLE = "SUITE_OUTCOMES"


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    import requests
    import utils  # type: ignore[import-not-found]

    utils.ServerPreset.load_all = staticmethod(lambda: None)  # its models are stand-ins
    start = utils.ServerProcess.start

    def start_patiently(server: Any, timeout_seconds: int = START_S) -> None:
        start(server, max(timeout_seconds, START_S))

    utils.ServerProcess.start = start_patiently
    request = utils.ServerProcess.make_request

    def make_request(server: Any, *args: Any, **kwargs: Any) -> Any:
        response = request(server, *args, **kwargs)
        # HTTP has no case in the names of headers, but the tests look them up in a plain dict.
        response.headers = requests.structures.CaseInsensitiveDict(response.headers)
        return response

    utils.ServerProcess.make_request = make_request


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Append the outcome: the test, what happened, and the line of the assertion that failed."""
    if report.when != "call" and report.passed:
        return
    lines = str(report.longrepr).splitlines() if report.failed else []
    reason = [line[1:].strip() for line in lines if line.startswith((">", "E "))]
    outcome = {"test": report.nodeid, "outcome": report.outcome, "reason": reason[:3]}
    with Path(os.environ[OUTCOMES_VARIABLE]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(outcome) + "\n")
