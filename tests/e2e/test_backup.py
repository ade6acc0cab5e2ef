"""A backup that is made under load starts a server which has the conversations, unchanged."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx

from rekindle.kvcache.disk.check import check
from tests.contract.engines import write_wide_llama
from tests.support.server import Server, running

CHAT = "/v1/chat/completions"
WORDS = " ".join(f"word {number} of the long story," for number in range(10))


def ask(server: Server, name: str, *more: str) -> dict[str, Any]:
    turns = [f"{name}: {WORDS}", *more]
    messages = [{"role": "user", "content": text} for text in turns]
    body = {"messages": messages, "max_tokens": 4, "temperature": 0, "session_id": name}
    with server.client() as client:
        answer = client.post(CHAT, json=body)
    assert answer.status_code == httpx.codes.OK, answer.text
    found: dict[str, Any] = answer.json()
    return found


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def test_a_copy_made_under_load_is_served_with_its_state(tmp_path: Path) -> None:
    model = write_wide_llama(tmp_path / "wide.gguf")
    copy, stop = tmp_path / "copy", threading.Event()
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    with running(model, tmp_path / "first", "--threads", "1") as server:
        before = ask(server, "kept")
        expected = ask(server, "kept", "And then?")

        def load() -> None:
            """Write a conversation to disk every few milliseconds, until the copy is complete."""
            number = 0
            while not stop.wait(0.05):
                number += 1
                ask(server, f"other {number}")

        loading = threading.Thread(target=load)
        loading.start()
        try:
            command = [sys.executable, "-m", "rekindle.cli.main", "cache", "backup", str(copy)]
            flags = ["--cache-dir", str(tmp_path / "first" / "kv")]
            ran = subprocess.run([*command, *flags], capture_output=True, text=True)
        finally:
            stop.set()
            loading.join()
        assert ran.returncode == 0, ran.stderr
    check(copy, repair=True)  # blocks that were written while the copy was made have no row yet
    assert [finding for each in check(copy, repair=False) for finding in each.findings] == []
    flags = ["--threads", "1", "--cache-dir", str(copy)]
    with running(model, tmp_path / "second", *flags) as server:
        again = ask(server, "kept", "And then?")
    reused = again["x_cache"]
    assert text_of(again) == text_of(expected)
    assert reused["tier"] == "disk"
    assert reused["reused_tokens"] >= before["usage"]["prompt_tokens"] // 2
