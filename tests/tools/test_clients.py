"""The parts of `make clients` that stand between a program and its server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from tools.clients import run
from tools.clients.recorder import recording

WAIT_S = 20


@pytest.fixture
def more() -> threading.Event:
    """Set when the rest of an answer may come."""
    return threading.Event()


@pytest.fixture
def upstream(more: threading.Event) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"first")
            more.wait(WAIT_S)
            self.wfile.write(b", last")

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_what_a_client_has_seen_is_recorded(upstream: str, more: threading.Event) -> None:
    with recording(upstream) as (url, recorder), httpx.stream("GET", url, timeout=WAIT_S) as answer:
        pieces, seen = answer.iter_raw(), b""
        while len(seen) < len("first"):
            seen += next(pieces)
        [exchange] = recorder.exchanges
        assert exchange.answer == "first"
        more.set()
        assert b"".join(pieces) == b", last"
        assert exchange.answer == "first, last"


def test_a_client_is_given_nothing_of_the_environment_but_where_programs_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program"
    program.write_text('#!/bin/sh\necho "{\\"home\\": \\"$HOME\\", \\"key\\": \\"$SOME_KEY\\"}"\n')
    program.chmod(0o700)
    monkeypatch.setattr(run, "CLAUDE", program)
    monkeypatch.setenv("SOME_KEY", "secret")
    client = run.ClaudeCode(tmp_path, "http://127.0.0.1:1")
    assert client.say("hello") == {"home": str(tmp_path / "home"), "key": ""}
