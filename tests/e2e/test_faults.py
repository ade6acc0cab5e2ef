"""The server handles faults around it. A tiny model keeps these tests fast."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.server import Server, running
from tests.support.tiny import write_llama

CALM_S = 60


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    model = write_llama(folder / "tiny.gguf", context=8192)
    with running(model, folder, "--threads", "1", "--parallel", "4", "--queue", "4") as started:
        yield started


def body(**more: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, **more}


def await_calm(server: Server) -> None:
    """Wait until a short question is answered quickly, which a leaked turn would prevent."""
    deadline = time.monotonic() + CALM_S
    with server.client() as client:
        while not client.post("/v1/chat/completions", json=body(max_tokens=1)).is_success:
            assert time.monotonic() < deadline, "the server does not calm down"
            time.sleep(0.05)


def test_a_client_that_hangs_up_frees_its_turn(server: Server) -> None:
    """Eight turns fill the server. After all clients hang up, it has free slots again."""
    for _ in range(3):
        with contextlib.ExitStack() as stack:
            client = stack.enter_context(server.client())
            for _ in range(4):
                stream = client.stream(
                    "POST",
                    "/v1/chat/completions",
                    json=body(stream=True, max_tokens=8000, ignore_eos=True),
                )
                response = stack.enter_context(stream)
                assert next(response.iter_lines())
        await_calm(server)


def test_a_killed_runtime_causes_a_clear_error_and_is_restarted(server: Server) -> None:
    [worker] = server.worker_pids()
    with server.client() as client:
        with client.stream(
            "POST",
            "/v1/chat/completions",
            json=body(stream=True, max_tokens=8000, ignore_eos=True),
        ) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            os.kill(worker, signal.SIGKILL)
            rest = "\n".join(lines)
        assert '"code":"model_restarting"' in rest
        assert rest.rstrip().endswith("data: [DONE]")
        deadline = time.monotonic() + CALM_S
        while client.get("/health").status_code != httpx.codes.OK:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert client.post("/v1/chat/completions", json=body(max_tokens=3)).is_success
    assert server.worker_pids() != [worker]


def test_a_stopped_server_ends_cleanly_with_its_children(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "tiny.gguf")
    with running(model, tmp_path, "--threads", "1") as server:
        children = server.worker_pids()
        assert children
    assert server.process.returncode == 0
    for pid in children:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_damaged_model_causes_one_sentence_and_no_traceback(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "tiny.gguf")
    model.write_bytes(model.read_bytes()[:-5000])
    with pytest.raises(RuntimeError, match="error:") as failure, running(model, tmp_path):
        pass
    assert "Traceback" not in str(failure.value)


def test_exact_mode_answers_and_reuses_state(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "tiny.gguf")
    question = body(max_tokens=5, logprobs=True)
    question["messages"] = [{"role": "user", "content": "a long question " * 20}]
    with running(model, tmp_path, "--threads", "1", "--exact") as server, server.client() as client:
        cold, warm = (client.post("/v1/chat/completions", json=question).json() for _ in range(2))
    assert warm["x_cache"]["reused_tokens"] >= 256
    assert warm["choices"] == cold["choices"]
