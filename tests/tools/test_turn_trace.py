"""The parts of the turn trace that need no server."""

from __future__ import annotations

import sys
from pathlib import Path

from tools.turn_trace import Probe, count_by_folder, modules_in, streamed_text

PACKAGE = Path("/src/rekindle")
THIS_FOLDER = f"{Path(__file__).parent}/"


def traced() -> None:
    """A function to call under the probe."""


def reported(probe: Probe, report: Path) -> list[str]:
    sys.setprofile(probe.profile)
    try:
        traced()
    finally:
        sys.setprofile(None)
    probe.stop()
    return report.read_text().split()


def test_a_probe_reports_the_files_of_the_package_whose_functions_ran(tmp_path: Path) -> None:
    probe = Probe(THIS_FOLDER, tmp_path / "report")
    probe.start()
    assert reported(probe, tmp_path / "report") == [__file__]


def test_a_probe_ignores_other_packages_and_calls_before_the_start(tmp_path: Path) -> None:
    elsewhere = Probe("/elsewhere/", tmp_path / "report")
    elsewhere.start()
    assert reported(elsewhere, tmp_path / "report") == []
    assert reported(Probe(THIS_FOLDER, tmp_path / "report"), tmp_path / "report") == []


def test_modules_of_several_processes_are_merged() -> None:
    reports = [
        "/src/rekindle/api/chat.py\n/src/rekindle/errors.py\n\n",
        "/src/rekindle/errors.py\n",
    ]
    assert modules_in(reports, PACKAGE) == ["api/chat.py", "errors.py"]


def test_modules_are_counted_by_folder_with_the_largest_first() -> None:
    modules = ["errors.py", "api/a.py", "api/base/b.py", "chat/c.py"]
    assert count_by_folder(modules) == {"api": 2, "(root)": 1, "chat": 1}
    assert next(iter(count_by_folder(modules))) == "api"


def test_the_text_of_a_stream_skips_empty_chunks_and_the_end() -> None:
    lines = [
        b'data: {"choices":[{"delta":{"role":"assistant"}}]}\n',
        b"\n",
        b'data: {"choices":[{"delta":{"content":"Mass "}}]}\n',
        b'data: {"choices":[{"delta":{"content":"is"}}]}\n',
        b'data: {"choices":[]}\n',
        b"data: [DONE]\n",
    ]
    assert streamed_text(lines) == "Mass is"
