"""After any kind of stop, a conversation with the real server continues as if nothing happened."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.server import Server, running
from tests.support.tiny import write_llama

PATIENCE_S = 30
FLAGS = ("--threads", "1", "--disk-cache", "200MB", "--disk-floor", "0")
QUESTIONS = ("first of all", "and then", "but why", "since when", "how far", "so what")

Message = dict[str, str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", context=8192)


@dataclass
class Talk:
    """A conversation with the server that is currently running."""

    messages: list[Message] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)

    def ask(self, server: Server, question: str) -> dict[str, Any]:
        self.messages.append({"role": "user", "content": f"{question}? " * 12})
        body = {
            "messages": self.messages,
            "max_tokens": 24,
            "temperature": 0,
            "ignore_eos": True,
            "session_id": "talk",
        }
        with server.client() as client:
            response = client.post("/v1/chat/completions", json=body)
        assert response.status_code == httpx.codes.OK, response.text
        answer: dict[str, Any] = response.json()
        self.answers.append(answer)
        self.messages.append({"role": "assistant", "content": self.text})
        return answer

    def go_through(self, server: Server, questions: Sequence[str]) -> None:
        for question in questions:
            self.ask(server, question)

    @property
    def text(self) -> str:
        text: str = self.answers[-1]["choices"][0]["message"]["content"]
        return text

    @property
    def usage(self) -> dict[str, Any]:
        usage: dict[str, Any] = self.answers[-1]["usage"]
        return usage

    @property
    def reused_tokens(self) -> int:
        tokens: int = self.usage["prompt_tokens_details"]["cached_tokens"]
        return tokens

    @property
    def tier(self) -> str | None:
        tier: str | None = self.answers[-1]["x_cache"]["tier"]
        return tier


def flags(folder: Path, *more: str) -> tuple[str, ...]:
    return (*FLAGS, "--cache-dir", str(folder / "kv"), *more)


def stored_tokens(server: Server) -> int:
    """The number of tokens that the server reports as stored."""
    with server.client() as client:
        entries = client.get("/v1/cache").json()["entries"]
    return max((entry["stored_tokens"] for entry in entries), default=0)


def await_stored(server: Server, tokens: int) -> int:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if (stored := stored_tokens(server)) >= tokens:
            return stored
        time.sleep(0.05)
    raise AssertionError("nothing is stored")


def test_turn_six_after_a_stop_computes_only_its_own_message(model: Path, tmp_path: Path) -> None:
    talk = Talk()
    with running(model, tmp_path, *flags(tmp_path)) as server:
        talk.go_through(server, QUESTIONS[:5])
    before = talk.usage["prompt_tokens"] + talk.usage["completion_tokens"]
    with running(model, tmp_path, *flags(tmp_path)) as server:
        talk.ask(server, QUESTIONS[5])
    assert "1 conversation found in the cache folder" in server.log.read_text()
    assert talk.tier == "disk"
    assert talk.reused_tokens == before - 1  # the last token was sampled but not computed
    assert talk.answers[-1]["x_cache"]["status"] == "hit"


def test_an_exact_answer_after_a_stop_equals_the_answer_without_a_stop(
    model: Path, tmp_path: Path
) -> None:
    never, stopped = Talk(), Talk()
    for name in ("never", "stopped"):
        (tmp_path / name).mkdir()
    with running(model, tmp_path / "never", *flags(tmp_path / "never", "--exact")) as server:
        never.go_through(server, QUESTIONS)
    exact = flags(tmp_path / "stopped", "--exact")
    with running(model, tmp_path / "stopped", *exact) as server:
        stopped.go_through(server, QUESTIONS[:5])
    with running(model, tmp_path / "stopped", *exact) as server:
        stopped.ask(server, QUESTIONS[5])
    assert stopped.tier == "disk"
    assert stopped.messages == never.messages


def test_state_reported_as_stored_is_reused_after_a_kill(model: Path, tmp_path: Path) -> None:
    """The server and its runtime are killed together, without a chance to clean up."""
    talk = Talk()
    with running(model, tmp_path, *flags(tmp_path)) as server:
        talk.go_through(server, QUESTIONS[:5])
        stored = await_stored(server, 256)
        kill_all(server)
    with running(model, tmp_path, *flags(tmp_path)) as server:
        assert stored_tokens(server) >= stored
        talk.ask(server, QUESTIONS[5])
    assert talk.tier == "disk"
    assert talk.reused_tokens >= stored


def test_answered_documents_are_there_after_a_kill(model: Path, tmp_path: Path) -> None:
    """The answer to a request that stores a response or an item says that it is on disk."""
    asked = {"input": "Remember me.", "max_output_tokens": 16, "temperature": 0}
    item = {"type": "message", "role": "user", "content": "First of all."}
    with running(model, tmp_path, *flags(tmp_path)) as server:
        conversation = post(server, "/v1/conversations", {"items": [item]})["id"]
        first = post(server, "/v1/responses", {**asked, "conversation": conversation})
        second = post(server, "/v1/responses", {**asked, "previous_response_id": first["id"]})
        items = get(server, f"/v1/conversations/{conversation}/items")
        kill_all(server)
    with running(model, tmp_path, *flags(tmp_path)) as server:
        assert len(items["data"]) == 3
        assert get(server, f"/v1/conversations/{conversation}/items") == items
        for response in (first, second):
            assert get(server, f"/v1/responses/{response['id']}")["output"] == response["output"]
        third = post(server, "/v1/responses", {**asked, "previous_response_id": second["id"]})
        assert third["usage"]["input_tokens"] > second["usage"]["input_tokens"]


def post(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    with server.client() as client:
        return _body(client.post(path, json=body))


def get(server: Server, path: str) -> dict[str, Any]:
    with server.client() as client:
        return _body(client.get(path))


def _body(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == httpx.codes.OK, response.text
    body: dict[str, Any] = response.json()
    return body


def kill_all(server: Server) -> None:
    """Kill all processes, so that none can react to the death of another."""
    workers = server.worker_pids()
    server.process.send_signal(signal.SIGSTOP)
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    server.process.kill()
    server.process.wait()


def test_a_killed_runtime_is_restarted_and_reads_its_disk(model: Path, tmp_path: Path) -> None:
    talk = Talk()
    with running(model, tmp_path, *flags(tmp_path)) as server:
        talk.go_through(server, QUESTIONS[:4])
        stored = await_stored(server, 256)
        [pid] = server.worker_pids()
        os.kill(pid, signal.SIGKILL)
        await_another(server, pid)
        talk.ask(server, QUESTIONS[4])
        assert talk.tier == "disk"
        assert talk.reused_tokens >= stored


def await_another(server: Server, pid: int) -> None:
    """Wait until a new runtime answers. Until then there is a clear error."""
    body = {"prompt": "hello", "max_tokens": 1}
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with server.client() as client:
            response = client.post("/v1/completions", json=body)
        if response.is_success and pid not in server.worker_pids():
            return
        time.sleep(0.1)
    raise AssertionError("no runtime has come back")
