"""The application on a real socket: uvicorn on loopback, in its own thread."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import uvicorn

from rekindle.front.operating import Server
from rekindle.http.middleware import Drain
from rekindle.http.protocol import HttpProtocol
from tests.api.scripted import Front

PATIENCE_S = 10.0


def soon(condition: Callable[[], bool]) -> None:
    """Wait until it is so; a test fails when it does not become so."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


class Live:
    """A running server, the front behind it, and what is going on in its loop."""

    def __init__(self, front: Front, drain_timeout_s: float = 10.0) -> None:
        self.front = front
        self.runtime = front.runtime
        self.sock = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._loop: asyncio.AbstractEventLoop | None = None
        drain = Drain(drain_timeout_s)
        app = front.app(drain)
        config = uvicorn.Config(
            app,
            http=HttpProtocol,
            log_config=None,
            lifespan="on",
            timeout_graceful_shutdown=1,
            timeout_keep_alive=60,  # on a slow machine the next request may be late
        )
        self._server = Server(config, app, drain)
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._server.serve(sockets=[self.sock])

    def start(self) -> None:
        self._thread.start()
        soon(lambda: self._server.started)

    def signal(self) -> None:
        """Tell it to stop as a signal does."""
        self._server.handle_exit(signal.SIGTERM, None)

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def tell_to_stop(self) -> None:
        self._server.should_exit = True

    def stop(self) -> None:
        self.tell_to_stop()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=PATIENCE_S)

    def connections(self) -> list[HttpProtocol]:
        found = list(self._server.server_state.connections)
        return [each for each in found if isinstance(each, HttpProtocol)]

    def tasks(self) -> int:
        """How many tasks the server's loop has, its own two included."""

        async def count() -> int:
            return len(asyncio.all_tasks()) - 1

        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(count(), self._loop).result(PATIENCE_S)

    def call(self, callback: Callable[[], object]) -> None:
        """Call something in the server's loop."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(callback)

    def is_idle(self) -> bool:
        return self.runtime.open_turns == 0 and self.tasks() <= 2

    def raw(self, content: bytes) -> socket.socket:
        """A connection on which these bytes were sent."""
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)
        sock.sendall(content)
        return sock


@contextlib.contextmanager
def live(front: Front, drain_timeout_s: float = 10.0) -> Iterator[Live]:
    server = Live(front, drain_timeout_s)
    server.start()
    try:
        yield server
    finally:
        server.stop()
