"""A proxy between client and server: it keeps what passes, and has the first reply call a tool.

The model behind it is too small to choose a tool by itself, so its reply to the first message of a
conversation is held to a call by the grammar, as `tool_choice` asks for.
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


@dataclass(frozen=True)
class Exchange:
    """One request, and as much of its answer as has come."""

    method: str
    path: str
    body: dict[str, Any]
    status: int
    received: bytearray = field(default_factory=bytearray)

    @property
    def answer(self) -> str:
        return self.received.decode(errors="replace")


class Recorder:
    """Passes everything on to `upstream`; the tool `forced` is called where a turn begins."""

    def __init__(self, upstream: str, forced: str | None = None) -> None:
        self.upstream = upstream
        self.forced = forced
        self.exchanges: list[Exchange] = []

    def amended(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        names = [tool.get("name") for tool in body.get("tools", ())]
        begins = len([each for each in body.get("messages", ()) if each["role"] == "user"]) == 1
        if path.endswith("/v1/messages") and begins and self.forced in names:
            return {**body, "tool_choice": {"type": "tool", "name": self.forced}}
        return body

    def failures(self) -> list[Exchange]:
        return [
            each for each in self.exchanges if each.status >= 400 or "event: error" in each.answer
        ]


@contextlib.contextmanager
def recording(upstream: str, forced: str | None = None) -> Iterator[tuple[str, Recorder]]:
    """The address of a recorder, and the recorder."""
    recorder = Recorder(upstream, forced)
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
        protocol_version = "HTTP/1.0"  # an answer ends with its connection

        def _pass_on(self) -> None:
            sent = self.rfile.read(int(self.headers.get("content-length", 0)))
            path = self.path.partition("?")[0]
            body = json.loads(sent) if sent else {}
            content = json.dumps(recorder.amended(path, body)).encode() if sent else None
            headers = {n: v for n, v in self.headers.items() if n.lower() not in HOP_BY_HOP}
            url = recorder.upstream + self.path
            with httpx.stream(
                self.command, url, content=content, headers=headers, timeout=ANSWER_S
            ) as answer:
                exchange = Exchange(self.command, path, body, answer.status_code)
                recorder.exchanges.append(exchange)  # before the client can have seen it
                self.send_response(answer.status_code)
                for name, value in answer.headers.items():
                    if name not in HOP_BY_HOP:
                        self.send_header(name, value)
                self.end_headers()
                with contextlib.suppress(BrokenPipeError):  # the client has enough
                    for chunk in answer.iter_raw():
                        exchange.received.extend(chunk)
                        self.wfile.write(chunk)
                        self.wfile.flush()

        do_GET = do_POST = do_HEAD = _pass_on

        def log_message(self, *_: Any) -> None:
            """Nothing: what matters is recorded."""

    return Handler
