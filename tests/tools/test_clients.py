"""The parts of `make clients` between a program and its server."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tools.clients.figures import Turn, turn_of
from tools.clients.programs import Program, ProgramFailed
from tools.clients.recorder import Exchange, Recorder, recording
from tools.clients.terminal import type_into

WAIT_S = 20


@pytest.fixture
def more() -> threading.Event:
    """Set when the rest of an answer may be sent."""
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


def test_everything_that_a_client_received_is_recorded(
    upstream: str, more: threading.Event
) -> None:
    with recording(upstream) as (url, recorder), httpx.stream("GET", url, timeout=WAIT_S) as answer:
        pieces, seen = answer.iter_raw(), b""
        while len(seen) < len("first"):
            seen += next(pieces)
        [exchange] = recorder.exchanges
        assert exchange.answer == "first"
        more.set()
        assert b"".join(pieces) == b", last"
        assert exchange.answer == "first, last"


class Echo(Program):
    name, package = "echo", "echo"

    def command(self, text: str, *, resumes: bool) -> list[str]:
        return ["sh", "-c", f'echo "{text} $HOME $SOME_KEY"; exit ${{STATUS:-0}}']


def test_a_client_gets_only_the_path_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_KEY", "secret")
    client = Echo(tmp_path, tmp_path, "http://127.0.0.1:1")
    assert client.say("hello") == f"hello {tmp_path / 'home'} \n"


def test_a_failed_client_is_reported_with_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Echo, "settings", {"STATUS": "3"})
    client = Echo(tmp_path, tmp_path, "http://127.0.0.1:1")
    with pytest.raises(ProgramFailed, match="hello"):
        client.say("hello")


def test_processes_that_a_client_leaves_running_are_ended(tmp_path: Path) -> None:
    client = Echo(tmp_path, tmp_path, "http://127.0.0.1:1")
    left = subprocess.Popen(["sleep", "60"], env=client.environment)
    other = subprocess.Popen(["sleep", "60"])
    client.close()
    assert left.wait(WAIT_S) == -signal.SIGTERM
    assert other.poll() is None
    other.kill()
    other.wait()


FUNCTION = {"type": "function", "function": {"name": "look"}}


@pytest.mark.parametrize(
    ("path", "tool", "choice"),
    [
        ("/v1/messages", {"name": "look"}, {"type": "tool", "name": "look"}),
        ("/v1/chat/completions", FUNCTION, FUNCTION),
        (
            "/v1/responses",
            {"type": "function", "name": "look"},
            {"type": "function", "name": "look"},
        ),
    ],
)
def test_the_first_reply_of_a_conversation_is_forced_to_call_the_tool(
    path: str, tool: dict[str, Any], choice: dict[str, Any]
) -> None:
    recorder = Recorder("http://127.0.0.1:1")
    recorder.forced = "look"
    said = "input" if path.endswith("responses") else "messages"
    begun: list[dict[str, Any]] = [{"role": "developer"}, {"role": "user"}]
    asked = {said: begun, "tools": [tool], "temperature": 0}
    assert recorder.amended(path, asked) == {**asked, "temperature": 1.0, "tool_choice": choice}
    for later in ({"role": "assistant"}, {"type": "function_call"}):
        answered = {said: [*begun, later], "tools": [tool]}
        assert recorder.amended(path, answered) == answered
    untooled = {said: begun}
    assert recorder.amended(path, untooled) == untooled


CHAT = """data: {"choices": [], "timings": {"cache_n": 7, "prompt_n": 3}}

data: {"choices": [], "x_cache": {"normalised": ["tools"]}}

data: [DONE]
"""
MESSAGES = """event: message_start
data: {"type": "message_start", "message": {}}

event: message_delta
data: {"type": "message_delta", "usage": {"output_tokens": 1, "input_tokens": 1, \
"cache_read_input_tokens": 7, "cache_creation_input_tokens": 2}, \
"x_cache": {"normalised": ["tools"]}}
"""
RESPONSES = """event: response.completed
data: {"type": "response.completed", "response": {"x_cache": {"normalised": ["tools"]}, \
"usage": {"input_tokens": 10, "input_tokens_details": {"cached_tokens": 7}}}}
"""


@pytest.mark.parametrize("answer", [CHAT, MESSAGES, RESPONSES])
def test_reused_tokens_are_read_in_each_dialect(answer: str) -> None:
    exchange = Exchange("POST", "/", {}, 200, bytearray(answer.replace("\\\n", "").encode()))
    assert turn_of(exchange) == Turn(10, 7, False, ("tools",))
    assert not exchange.failed


@pytest.mark.parametrize(
    "answer", ["event: error\n", "event: response.failed\n", 'data: {"error": {}}\n']
)
def test_an_error_in_a_stream_is_recognised(answer: str) -> None:
    assert Exchange("POST", "/", {}, 200, bytearray(answer.encode())).failed


@pytest.mark.parametrize("command", [["/does/not/exist"], ["/bin/echo", "hello"]])
def test_nobody_waits_for_a_program_that_cannot_run_or_ends_immediately(
    command: list[str], tmp_path: Path
) -> None:
    assert not type_into(
        command,
        "hello",
        folder=tmp_path,
        environment={},
        asks=b"?",
        is_done=lambda: False,
        patience_s=1e9,
    )
