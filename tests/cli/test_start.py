"""Ctrl-C ends the command quietly, also while Python still imports it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

#: Takes the place of a package that the command line imports, and never comes back.
STALLING = """
import signal, time
print(signal.getsignal(signal.SIGINT).name, flush=True)
time.sleep(600)
"""


def start(folder: Path, *, ignoring: bool = False) -> subprocess.Popen[str]:
    (folder / "typer.py").write_text(STALLING)
    # The tests themselves may run in the background, where a shell lets programs ignore Ctrl-C.
    handler = "SIG_IGN" if ignoring else "default_int_handler"
    code = f"import signal; signal.signal(signal.SIGINT, signal.{handler})"
    process = subprocess.Popen(
        [sys.executable, "-c", f"{code}; import rekindle.cli.start; rekindle.cli.start.main()"],
        env={**os.environ, "PYTHONPATH": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return process


def handler_during_import(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_ctrl_c_during_an_import_prints_no_traceback(tmp_path: Path) -> None:
    with start(tmp_path) as process:
        assert handler_during_import(process) == "SIG_DFL"
        process.send_signal(signal.SIGINT)
        try:
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert errors == ""
    assert process.returncode == -signal.SIGINT


def test_a_command_that_a_shell_runs_in_the_background_ignores_ctrl_c(tmp_path: Path) -> None:
    with start(tmp_path, ignoring=True) as process:
        assert handler_during_import(process) == "SIG_IGN"
        process.kill()


def test_little_is_imported_before_ctrl_c_is_quiet() -> None:
    """Until then Ctrl-C prints a traceback."""
    code = "import sys; old = {*sys.modules}; import rekindle.cli.interrupts; "
    code += "print(*{*sys.modules} - old)"
    command = [sys.executable, "-c", code]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert "rekindle" in shown
    assert {"typing", "re", "contextlib"}.isdisjoint(shown)
