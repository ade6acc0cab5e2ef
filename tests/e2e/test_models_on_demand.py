"""Real processes of tiny models, which a server loads when a request names them."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.support.rounds import rounds
from tests.support.server import Server, running
from tests.support.tiny import write_adapter, write_llama

NAMES = ("one", "two", "three")
MAX_MEMORY = 700_000_000  # two of the models, as they are estimated
PATIENCE_S = 60.0
PROMPT = "a prompt that is long enough to leave some blocks of state behind, is it not? yes. "


def write_settings(folder: Path, **more: Any) -> Path:
    """Three tiny models, the first with an adapter."""
    for seed, name in enumerate(NAMES):
        write_llama(folder / f"{name}.gguf", seed=seed, context=1024)
    write_adapter(folder / "poet.gguf", seed=7)
    models: dict[str, Any] = {name: {"model": str(folder / f"{name}.gguf")} for name in NAMES}
    models["one"]["adapters"] = {"poet": str(folder / "poet.gguf")}
    settings = {"models": models, "models_dir": str(folder / "models"), "parallel": 4, **more}
    path = folder / "rekindle.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("on-demand")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    settings = write_settings(folder, max_memory=MAX_MEMORY, ram_cache="64MB")
    with running(None, folder, "--config", str(settings)) as started:
        yield started


def complete(client: httpx.Client, model: str) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "logprobs": 1}
    return client.post("/v1/completions", json=body)


def said(answer: dict[str, Any]) -> list[float]:
    """The log probabilities of a reply: tiny models often choose the same tokens."""
    choice = answer["choices"][0]
    found: list[float] = choice["logprobs"]["token_logprobs"]
    return found


def complete_alone(server: Server, model: str) -> httpx.Response:
    with server.client() as client:
        return complete(client, model)


def states(client: httpx.Client) -> dict[str, dict[str, Any]]:
    listed = client.get("/v1/internal/model/list").json()["models"]
    return {each["name"]: each for each in listed}


class Watch:
    """Records the largest memory that the server's models take together."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.counted_bytes = 0
        self.resident_bytes = 0

    def _run(self) -> None:
        with self._server.client() as client:
            while not self._over.wait(0.1):
                listed = client.get("/v1/internal/model/list").json()
                self.counted_bytes = max(self.counted_bytes, listed["memory_bytes"])
                found = client.get("/management/processes").json()["processes"]
                resident = sum(each["resident_bytes"] for each in found)
                self.resident_bytes = max(self.resident_bytes, resident)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


@pytest.mark.long
def test_three_models_share_the_memory_of_two(server: Server) -> None:
    """Every request is answered, and a model that was unloaded finds its state again."""
    count = rounds(6, 200)

    def ask(number: int) -> tuple[str, httpx.Response]:
        name = NAMES[number % len(NAMES)]
        return name, complete_alone(server, name)

    with Watch(server) as watch, ThreadPoolExecutor(4) as clients:
        answers = list(clients.map(ask, range(count)))
    texts: dict[str, set[str]] = {name: set() for name in NAMES}
    reused = []
    for name, answer in answers:
        assert answer.status_code == 200, answer.text
        texts[name].add(answer.json()["choices"][0]["text"])
        reused.append(answer.json()["x_cache"]["reused_tokens"])
    assert watch.counted_bytes <= MAX_MEMORY
    assert watch.resident_bytes <= MAX_MEMORY
    assert all(len(found) == 1 for found in texts.values()), "a reload changed an answer"
    with server.client() as client:
        assert sum(each["status"] == "loaded" for each in states(client).values()) == 2
        for name in NAMES:  # at least one of them has to be loaded again for this
            assert complete(client, name).json()["x_cache"]["reused_tokens"] >= 64
    assert (
        sum(tokens >= 64 for tokens in reused) >= count - 3 * 4
    )  # computed before any state was written


def test_an_adapter_answers_as_a_model_of_its_own_with_state_of_its_own(server: Server) -> None:
    with server.client() as client:
        plain = complete(client, "one").json()
        adapted, again = (complete(client, "one:poet").json() for _ in range(2))
        assert adapted["model"] == "one:poet"
        assert said(adapted) != said(plain)
        assert again["choices"][0]["text"] == adapted["choices"][0]["text"]
        assert adapted["x_cache"]["reused_tokens"] == 0, "the state of the plain model was reused"
        assert again["x_cache"]["reused_tokens"] >= 64


def test_weights_that_change_while_unloaded_never_reuse_the_state_of_the_old_ones(
    server: Server, folder: Path
) -> None:
    file, kept = folder / "two.gguf", folder / "kept.gguf"
    with server.client() as client:
        before = complete(client, "two").json()
        assert client.post("/v1/internal/model/unload", json={"model": "two"}).is_success
        stat = file.stat()
        shutil.copy2(file, kept)
        write_llama(file, seed=99, context=1024)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # size and time are the same
        assert file.stat().st_size == stat.st_size
        changed = complete(client, "two").json()
        assert changed["x_cache"]["reused_tokens"] == 0
        assert said(changed) != said(before)
        assert client.post("/v1/internal/model/unload", json={"model": "two"}).is_success
        shutil.copy2(kept, file)
        restored = complete(client, "two").json()
        assert restored["x_cache"]["reused_tokens"] >= 64
        assert restored["choices"][0]["text"] == before["choices"][0]["text"]


def test_a_load_whose_process_is_killed_fails_alone_and_is_tried_again(server: Server) -> None:
    with server.client() as client:
        assert complete(client, "one").is_success
        client.post("/v1/internal/model/unload", json={"model": "three"})
        [loaded] = [p["pid"] for p in _processes(client) if p["model"] == "one"]
        with ThreadPoolExecutor(1) as other:
            waiting = other.submit(complete_alone, server, "three")
            pid = _await_process(client, "three")
            os.kill(pid, signal.SIGKILL)
            failed = waiting.result()
        assert failed.status_code == 503
        assert "died while loading" in failed.json()["error"]["message"]
        assert int(failed.headers["retry-after"]) >= 1
        assert loaded in [p["pid"] for p in _processes(client)]
        assert complete(client, "one").is_success
        deadline = time.monotonic() + PATIENCE_S
        while not complete(client, "three").is_success:
            assert time.monotonic() < deadline
            time.sleep(0.2)


def test_a_cancelled_load_leaves_no_process(server: Server) -> None:
    with server.client() as client:
        client.post("/v1/internal/model/unload", json={"model": "three"})
        with ThreadPoolExecutor(1) as other:
            waiting = other.submit(complete_alone, server, "three")
            pid = _await_process(client, "three")
            assert client.post("/v1/internal/model/unload", json={"model": "three"}).is_success
            assert waiting.result().status_code == 503
        assert not Path(f"/proc/{pid}").exists()
        assert states(client)["three"]["status"] == "unloaded"


def _processes(client: httpx.Client) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.get("/management/processes").json()["processes"]
    return found


def _await_process(client: httpx.Client, name: str) -> int:
    """Wait until the process of a model has started to load it."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for process in _processes(client):
            if process["model"] == name and process["status"] == "loading":
                pid: int = process["pid"]
                return pid
        time.sleep(0.01)
    raise AssertionError(f"{name} was not loaded")
