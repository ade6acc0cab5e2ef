"""nginx in front of the server, with its default configuration and a read timeout of four seconds.

Needs nginx on the machine. The parts that need no proxy are tested in tests/front and tests/http.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.support.rounds import LONG
from tests.support.server import START_S, Server, free_port, running

pytestmark = [
    pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed"),
    pytest.mark.skipif(not LONG, reason="takes two minutes: `make stress`"),
    pytest.mark.long,
]
HOST = "models.example"
KEY = "sk-proxy"
SHORT = {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 2}
CONFIGURATION = """
user {user};
pid {folder}/nginx.pid;
error_log {folder}/error.log;
daemon off;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass {upstream};
            proxy_set_header Host $host;
            proxy_read_timeout 4s;
        }}
    }}
}}
"""


@dataclass(frozen=True)
class Proxied:
    server: Server
    client: httpx.Client

    def stream(self, text: str) -> contextlib.AbstractContextManager[httpx.Response]:
        messages = [{"role": "user", "content": text}]
        body = {"messages": messages, "stream": True, "max_tokens": 4}
        return self.client.stream("POST", "/v1/chat/completions", json=body)

    def chat(self, text: str) -> str:
        """A streamed response, which must not end early."""
        with self.stream(text) as answer:
            assert answer.status_code == 200, answer.read()
            return "".join(answer.iter_text())


@contextlib.contextmanager
def nginx(folder: Path, upstream: str) -> Iterator[httpx.Client]:
    port, file = free_port(), folder / "nginx.conf"
    file.write_text(
        CONFIGURATION.format(user=getpass.getuser(), folder=folder, port=port, upstream=upstream)
    )
    with (folder / "nginx.log").open("wb") as output:
        process = subprocess.Popen(["nginx", "-c", str(file)], stderr=output)
    headers = {"host": HOST, "authorization": f"Bearer {KEY}"}
    url = f"http://127.0.0.1:{port}"
    try:
        with httpx.Client(base_url=url, headers=headers, timeout=300) as client:
            yield client
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(START_S)


LONG_WORDS, SHORT_PROMPTS = 5000, 49


@pytest.fixture
def proxied(tmp_path: Path) -> Iterator[Proxied]:
    flags = ("--threads", "1", "--api-key", KEY, "--allowed-host", HOST)
    with running("smollm2", tmp_path, *flags) as server, nginx(tmp_path, server.url) as client:
        yield Proxied(server, client)


def words(count: int) -> str:
    names = ("river", "stone", "cloud", "forest", "market", "engine", "window")
    return " ".join(names[number * number % len(names)] for number in range(count))


def test_a_prompt_that_takes_a_minute_and_49_short_ones_all_end_well(proxied: Proxied) -> None:
    with ThreadPoolExecutor(SHORT_PROMPTS + 1) as pool:
        long = pool.submit(proxied.chat, words(LONG_WORDS))
        short = [
            pool.submit(proxied.chat, f"Say the number {number}.")
            for number in range(SHORT_PROMPTS)
        ]
        texts = [each.result() for each in (*short, long)]
    assert all(text.endswith("data: [DONE]\n\n") for text in texts)
    assert not any('"error"' in text for text in texts)


def test_a_restart_of_the_model_ends_streams_with_an_error_event_and_then_serves_again(
    proxied: Proxied,
) -> None:
    with contextlib.ExitStack() as stack:
        answers = [
            stack.enter_context(proxied.stream(words(LONG_WORDS) + str(number)))
            for number in range(4)
        ]
        parts = [answer.iter_text() for answer in answers]
        begun = [next(part) for part in parts]
        for pid in proxied.server.worker_pids():
            os.kill(pid, signal.SIGKILL)
        texts = [first + "".join(rest) for first, rest in zip(begun, parts, strict=True)]
    for text in texts:
        assert "model_restarting" in text
        assert text.endswith("data: [DONE]\n\n")
    deadline_s = time.monotonic() + START_S
    while (answer := proxied.client.post("/v1/chat/completions", json=SHORT)).status_code != 200:
        assert answer.status_code == 503, answer.text
        assert answer.json()["error"]["message"]  # from the server, not from nginx
        assert time.monotonic() < deadline_s
        time.sleep(0.5)


def test_another_host_name_is_refused_by_the_server(proxied: Proxied) -> None:
    answer = proxied.client.post("/v1/chat/completions", json=SHORT, headers={"host": "evil.test"})
    assert answer.status_code == 421


def test_nginx_reaches_the_server_through_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "rekindle.sock"
    output = (tmp_path / "server.log").open("wb")
    command = [sys.executable, "-m", "rekindle.cli.main", "serve", "--model", "smollm2"]
    flags = ["--uds", str(path), "--cache-dir", str(tmp_path / "kv"), "--threads", "1"]
    access = ["--api-key", KEY, "--allowed-host", HOST]
    process = subprocess.Popen([*command, *flags, *access], stdout=output, stderr=output)
    try:
        with nginx(tmp_path, f"http://unix:{path}") as client:
            deadline_s = time.monotonic() + START_S
            while client.get("/health").status_code != 200:
                assert time.monotonic() < deadline_s
                time.sleep(0.2)
            assert client.post("/v1/chat/completions", json=SHORT).status_code == 200
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(START_S) == 0
        output.close()
    assert not path.exists()
