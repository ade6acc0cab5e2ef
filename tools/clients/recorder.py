"""Records the exchanges between client and server in a proxy, and forces a first tool call.

The model is too small to choose a tool, so the proxy adds `tool_choice` to the first request of a
conversation. It also sets the temperature, because greedy replies of this model would not end.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

HOP_BY_HOP = {"connection", "content-length", "host", "transfer-encoding", "accept-encoding"}
ANSWER_S = 600
BEFORE_REPLIES = ("system", "developer", "user")


@dataclass(frozen=True)
class Exchange:
    """A request and the answer received so far."""

    method: str
    path: str
    body: dict[str, Any]
    status: int
    received: bytearray = field(default_factory=bytearray)
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def answer(self) -> str:
        return self.received.decode(errors="replace")

    @contextlib.contextmanager
    def until_its_end(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.ended.set()

    @property
    def failed(self) -> bool:
        in_stream = ("event: error", "event: response.failed", 'data: {"error"')
        return self.status >= 400 or any(mark in self.answer for mark in in_stream)


class Recorder:
    """Forwards everything to `upstream`, and forces a call of the tool `forced` at the start of a
    conversation."""

    def __init__(self, upstream: str) -> None:
        self.upstream = upstream
        self.forced: str | None = None
        self.exchanges: list[Exchange] = []

    def ended_exchanges(self) -> int:
        return sum(each.ended.is_set() for each in self.exchanges)

    def amended(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if "temperature" in body:
            body = {**body, "temperature": 1.0}
        said = body.get("messages") or body.get("input") or ()
        has_begun = any(
            isinstance(each, dict) and each.get("role") not in BEFORE_REPLIES for each in said
        )
        names = [tool.get("function", tool).get("name") for tool in body.get("tools") or ()]
        if has_begun or self.forced not in names:
            return body
        choice: dict[str, Any] = {"type": "function", "name": self.forced}
        if path.endswith("/messages"):
            choice["type"] = "tool"
        elif path.endswith("/chat/completions"):
            choice = {"type": "function", "function": {"name": self.forced}}
        return {**body, "tool_choice": choice}


@contextlib.contextmanager
def recording(upstream: str) -> Iterator[tuple[str, Recorder]]:
    """Run a recorder, and yield its URL and itself."""
    recorder = Recorder(upstream)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(recorder))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", recorder
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(recorder: Recorder) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"  # closing the connection ends an answer

        def _pass_on(self) -> None:
            sent = self._sent()
            path = self.path.partition("?")[0]
            body = json.loads(sent) if sent else {}
            content = json.dumps(recorder.amended(path, body)).encode() if sent else None
            headers = {n: v for n, v in self.headers.items() if n.lower() not in HOP_BY_HOP}
            url = recorder.upstream + self.path
            with httpx.stream(
                self.command, url, content=content, headers=headers, timeout=ANSWER_S
            ) as answer:
                exchange = Exchange(self.command, path, body, answer.status_code)
                recorder.exchanges.append(exchange)  # before the client can see the answer
                self.send_response(answer.status_code)
                for name, value in answer.headers.items():
                    if name not in HOP_BY_HOP:
                        self.send_header(name, value)
                self.end_headers()
                with (
                    contextlib.suppress(ConnectionError),
                    exchange.until_its_end(),
                ):  # the client may hang up
                    for chunk in answer.iter_raw():
                        exchange.received.extend(chunk)
                        self.wfile.write(chunk)
                        self.wfile.flush()

        def _sent(self) -> bytes:
            if self.headers.get("transfer-encoding", "").lower() != "chunked":
                return self.rfile.read(int(self.headers.get("content-length", 0)))
            chunks = []
            while size := int(self.rfile.readline().partition(b";")[0], 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(chunks)

        do_GET = do_POST = do_HEAD = do_DELETE = _pass_on

        def log_message(self, *_: Any) -> None:
            """Log nothing. The recorder has all exchanges."""

    return Handler
