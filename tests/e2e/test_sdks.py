"""Suites of SDKs, each in a process of its own: LangChain's standard tests, and LiteLLM."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
SUITES = Path(__file__).parent / "sdks"
LONGEST_S = 300
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}


@pytest.mark.parametrize("suite", ["langchain_standard.py", "litellm_calls.py"])
def test_the_suite_passes(suite: str, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    options = [f"--rootdir={ROOT}", f"--junitxml={report}", "--tb=short"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", SUITES / "pytest.ini", *options, SUITES / suite],
        cwd=ROOT,
        env={**_without_pytest(os.environ), **OFFLINE},
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    cases = ElementTree.parse(report).findall(".//testcase")
    assert len(cases) >= 20
    assert not [case for case in cases if case.find("skipped") is not None]


def _without_pytest(environment: Mapping[str, str]) -> dict[str, str]:
    """What is meant for this run of pytest is not meant for the other."""
    return {name: value for name, value in environment.items() if not name.startswith("PYTEST_")}
