"""The suites of SDKs pass, each in its own process: LangChain's standard tests and LiteLLM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
SUITES = Path(__file__).parent / "sdks"
LONGEST_S = 300
OFFLINE = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LANGSMITH_TRACING": "false",
    "LANGCHAIN_TRACING_V2": "false",
}


@pytest.mark.parametrize("suite", ["langchain_standard.py", "litellm_calls.py"])
def test_the_suite_of_an_sdk_passes(suite: str, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    options = [f"--rootdir={ROOT}", f"--junitxml={report}", "--tb=short"]
    status, shown = _run(
        [sys.executable, "-m", "pytest", "-c", SUITES / "pytest.ini", *options, SUITES / suite]
    )
    assert status == 0, shown
    cases = ElementTree.parse(report).findall(".//testcase")
    assert len(cases) >= 20
    assert not [case for case in cases if case.find("skipped") is not None]


def _run(command: list[Any]) -> tuple[int, str]:
    """Run a suite, end the servers that it started, and return its exit status and output."""
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**_without_pytest(os.environ), **OFFLINE},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            shown, _ = process.communicate(timeout=LONGEST_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return process.returncode, shown


def _without_pytest(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables of this pytest run."""
    return {name: value for name, value in environment.items() if not name.startswith("PYTEST_")}
