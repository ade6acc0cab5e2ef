"""A backup that is made under load starts a server which has the conversations, unchanged."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx

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
            for number in range(1000):
                if stop.is_set():
                    return
                ask(server, f"other {number}")

        loads = [threading.Thread(target=load) for _ in range(2)]
        for each in loads:
            each.start()
        try:
            command = [sys.executable, "-m", "rekindle.cli.main", "cache", "backup", str(copy)]
            flags = ["--cache-dir", str(tmp_path / "first" / "kv")]
            ran = subprocess.run([*command, *flags], capture_output=True, text=True)
        finally:
            stop.set()
            for each in loads:
                each.join()
        assert ran.returncode == 0, ran.stderr
    check = [sys.executable, "-m", "rekindle.cli.main", "cache", "check", "--cache-dir", str(copy)]
    subprocess.run([*check, "--repair"], capture_output=True)
    assert subprocess.run(check, capture_output=True).returncode == 0
    flags = ["--threads", "1", "--cache-dir", str(copy)]
    with running(model, tmp_path / "second", *flags) as server:
        again = ask(server, "kept", "And then?")
    reused = again["x_cache"]
    assert text_of(again) == text_of(expected)
    assert reused["tier"] == "disk"
    assert reused["reused_tokens"] >= before["usage"]["prompt_tokens"] // 2
