"""A hostile HTTP server, and a canary server that must never be reached."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PEM = Path(__file__).with_name("attacker.pem")  # for attacker.test, valid for a hundred years
PATIENCE_S = 20.0


class Handler(BaseHTTPRequestHandler):
    """Each path is a trick."""

    server: Attacker

    def do_GET(self) -> None:
        self.server.requests.append((self.path, dict(self.headers)))
        trick = getattr(self, self.path[1:].partition("?")[0].replace("-", "_"), None)
        if trick is not None:
            trick()
        else:
            self._send(self.server.files.get(self.path, (b"", ""))[0])

    def _send(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def redirect(self) -> None:
        self._send(b"", 302, Location=self.path.partition("?")[2])

    def loop(self) -> None:
        self._send(b"", 302, Location="/loop")

    def slow(self) -> None:
        """Send one byte, and then nothing until the test ends."""
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"x")
        self.wfile.flush()
        self.server.ended.wait(PATIENCE_S)

    def drip(self) -> None:
        """Send one byte at a time, for ever."""
        self.send_response(200)
        self.end_headers()
        while not self.server.ended.wait(0.02):
            self.wfile.write(b"x")
            self.wfile.flush()

    def endless(self) -> None:
        self.send_response(200)
        self.end_headers()
        while not self.server.ended.is_set():
            self.wfile.write(b"x" * 65536)

    def huge_header(self) -> None:
        self._send(b"", X_Long="x" * 300_000)

    def lying_length(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000000000000")
        self.end_headers()

    def cut_short(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b"x")

    def compressed(self) -> None:
        self._send(b"x", Content_Encoding="gzip")

    def no_http(self) -> None:
        self.wfile.write(b"220 mail.example ESMTP\r\n")

    def missing(self) -> None:
        self._send(b"nothing here", 404)

    def log_message(self, *_: Any) -> None:
        pass


class Attacker(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, *, tls: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, tuple[bytes, str]] = {}
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.ended = threading.Event()
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(PEM)
            self.socket = context.wrap_socket(self.socket, server_side=True)

    @property
    def port(self) -> int:
        port: int = self.server_address[1]
        return port

    def url(self, path: str, host: str = "attacker.test", scheme: str = "http") -> str:
        return f"{scheme}://{host}:{self.port}{path}"

    def handle_error(self, *_: Any) -> None:
        """Ignore clients that close the connection, because that is what is tested."""


@contextmanager
def attacking(*, tls: bool = False) -> Iterator[Attacker]:
    with Attacker(tls=tls) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.ended.set()
        server.shutdown()
        thread.join(PATIENCE_S)


class Canary:
    """Listens on loopback. A connection means that a check has failed."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]

    @property
    def was_hit(self) -> bool:
        """Whether a connection is in the backlog."""
        try:
            connection, _ = self._socket.accept()
        except BlockingIOError:
            return False
        connection.close()
        return True

    def close(self) -> None:
        self._socket.close()
