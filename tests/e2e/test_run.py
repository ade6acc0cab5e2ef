"""`rekindle run` loads a model, answers and stops, without a server of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.server import ONE_THREAD, running


def run(*arguments: str, piped: str, folder: Path) -> subprocess.CompletedProcess[str]:
    settings = {**ONE_THREAD, "REKINDLE_CACHE_DIR": str(folder / "kv")}
    return subprocess.run(
        [sys.executable, "-m", "rekindle.cli.main", *arguments],
        input=piped,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **settings},
        check=False,
    )


def test_a_file_and_a_question_get_an_answer_from_a_server_for_one_chat(
    smollm2_path: Path, tmp_path: Path
) -> None:
    flags = ("--temperature", "0", "--max-tokens", "8", "--base-url", "http://127.0.0.1:9/v1")
    ended = run(
        "run", str(smollm2_path), "What colour is it?", *flags,
        piped="The car is red.", folder=tmp_path,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "car" in ended.stdout.lower()
    assert "for this chat" in ended.stderr


def test_a_running_server_answers_instead(smollm2_path: Path, tmp_path: Path) -> None:
    with running(smollm2_path, tmp_path) as server:
        flags = ("--temperature", "0", "--max-tokens", "8", "--base-url", f"{server.url}/v1")
        for arguments in (("chat",), ("run", str(smollm2_path))):
            ended = run(
                *arguments, "What colour is it?", *flags,
                piped="The car is red.", folder=tmp_path / "other",
            )  # fmt: skip
            assert ended.returncode == 0, ended.stderr
            assert "car" in ended.stdout.lower()
            assert ended.stderr == ""


def test_ctrl_c_in_a_terminal_reaches_the_server_only(smollm2_path: Path, tmp_path: Path) -> None:
    """The process of a model would print a traceback while it still imports modules."""
    with running(smollm2_path, tmp_path) as server:
        for pid in server.worker_pids():
            assert os.getsid(pid) == pid
