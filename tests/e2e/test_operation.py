"""An operator runs the server with keys in a file, a warm project, an 8-bit KV cache and
signals."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from rekindle.http import key_file
from tests.contract.engines import write_wide_llama
from tests.support.server import Server, running
from tests.support.tiny import write_llama

SYSTEM = "You are a financial analyst who chooses every word with care and says nothing twice."
PROJECT = f"""
projects:
  agent:
    system_prompt: {SYSTEM}
    shared: true
    cache: {{warm_on_startup: true, pinned: true, ttl: null}}
"""


@dataclass(frozen=True)
class House:
    server: Server
    keys: Path

    def new_key(self, name: str, *, admin: bool = False) -> str:
        key = key_file.new_key()
        key_file.append_key_line(self.keys, key_file.key_line(name, key, admin=admin))
        return key

    def cache(self, key: str, *arguments: str) -> Any:
        """Run `rekindle cache … --json`."""
        flags = ["--base-url", f"{self.server.url}/v1", "--json"]
        told = subprocess.run(
            [sys.executable, "-m", "rekindle.cli.main", "cache", *arguments, *flags],
            env={**os.environ, "REKINDLE_API_KEY": key},
            capture_output=True,
            text=True,
        )
        assert told.returncode == 0, told.stderr
        return json.loads(told.stdout)

    def ask(self, key: str, **more: Any) -> httpx.Response:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Hello."}]
        body = {"messages": messages, "max_tokens": 3, "temperature": 0, **more}
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.post(f"{self.server.url}/v1/chat/completions", json=body, headers=headers)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("house")
    settings, keys = folder / "rekindle.yaml", folder / "keys"
    settings.write_text(PROJECT)
    key_file.append_key_line(keys, "# keys of the house")
    flags = ("--threads", "1", "--fp8-kvcache", "--api-keys-file", str(keys),
             "--config", str(settings), "--cache-dir", str(folder / "kv"))  # fmt: skip
    with running(write_wide_llama(folder / "wide.gguf"), folder, *flags) as server:
        yield House(server, keys)


@pytest.fixture(scope="module")
def root(house: House) -> str:
    """An admin key that is created after the server has started."""
    key = house.new_key("root", admin=True)
    deadline = time.monotonic() + 30
    while house.ask(key).status_code != httpx.codes.OK:
        assert time.monotonic() < deadline, "the changed file of keys is not read"
        time.sleep(0.1)
    return key


def test_the_log_states_the_kv_type(house: House) -> None:
    assert "KV cache type: q8_0 (8 bits)" in house.server.log.read_text()


def test_a_project_is_warm_for_its_first_user(house: House, root: str) -> None:
    key = house.new_key("first")
    time.sleep(key_file.RELOAD_INTERVAL_S)
    answer = house.ask(key).json()
    assert answer["x_cache"]["reused_tokens"] >= 64
    [prepared] = [each for each in house.cache(root, "ls")["entries"] if each["pinned"]]
    assert prepared["expires_at"] is None
    assert prepared["stored_tokens"] >= 64


def test_the_cache_commands_work_on_a_running_server(house: House, root: str) -> None:
    key = house.ask(root, return_cache_key=True).json()["x_cache"]["new_cache_key"]
    assert house.cache(root, "show", key[:10])["cache_key"] == key
    assert house.cache(root, "pin", key)["pinned"] is True
    assert house.cache(root, "unpin", key)["pinned"] is False
    assert house.cache(root, "stats")["total_entries"] >= 2
    assert house.cache(root, "rm", key) == [{"status": "evicted", "cache_key": key}]
    assert key not in {each["cache_key"] for each in house.cache(root, "ls")["entries"]}
    assert house.cache(root, "gc")["status"] == "ok"


def test_explain_shows_where_a_request_differs_from_an_entry(
    house: House, root: str, tmp_path: Path
) -> None:
    key = house.ask(root, return_cache_key=True).json()["x_cache"]["new_cache_key"]
    file = tmp_path / "messages.json"
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Goodbye."}]
    file.write_text(json.dumps(messages))
    told = house.cache(root, "explain", "--key", key, "--messages", str(file))
    assert told["status"] == "partial_hit"
    assert told["diverged_at"]["message"] == 1


def test_a_stopping_server_refuses_new_requests_and_ends_streams_at_the_second_signal(
    tmp_path: Path,
) -> None:
    model = write_llama(tmp_path / "tiny.gguf", context=32768)
    flags = ("--threads", "1", "--cache-dir", str(tmp_path / "kv"))
    endless = {"messages": [{"role": "user", "content": "hello"}], "stream": True,
               "max_tokens": 32000, "ignore_eos": True}  # fmt: skip
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(running(model, tmp_path, *flags))
        client = stack.enter_context(server.client())
        streams = [client.stream("POST", "/v1/chat/completions", json=endless) for _ in range(20)]
        lines = [stack.enter_context(stream).iter_lines() for stream in streams]
        assert all(next(each) for each in lines)
        server.process.send_signal(signal.SIGTERM)
        await_refusal(server)
        refused = httpx.post(f"{server.url}/v1/chat/completions", json=endless)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
        assert refused.headers["retry-after"]
        assert server.process.poll() is None, "it did not wait for its streams"
        await_line(server, "Stopping: waiting for 2[01] requests")  # one may be for /health
        server.process.send_signal(signal.SIGTERM)
        for each in lines:
            *_, error, done = filter(None, each)
            assert json.loads(error.removeprefix("data: "))["error"]["code"] == "unavailable"
            assert done == "data: [DONE]"
        assert server.process.wait(60) == 0
    log = server.log.read_text()
    assert "Traceback" not in log
    assert " ERROR " not in log


def await_line(server: Server, pattern: str) -> None:
    """Wait until the server's log has a line. It is written within a tenth of a second."""
    deadline = time.monotonic() + 30
    while not re.search(pattern, server.log.read_text()):
        assert time.monotonic() < deadline, server.log.read_text()
        time.sleep(0.02)


def await_refusal(server: Server) -> None:
    deadline = time.monotonic() + 30
    while httpx.get(f"{server.url}/health").status_code != httpx.codes.SERVICE_UNAVAILABLE:
        assert time.monotonic() < deadline, "the server still lets clients in"
        time.sleep(0.02)
