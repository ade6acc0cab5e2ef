"""Stops a server gracefully: requests in flight may finish, and new ones are refused."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from types import FrameType

import uvicorn

from rekindle.errors import Unavailable

DRAIN_S = 10  # how long requests in flight may take to finish


class Stopping(Unavailable):
    """Every new request gets this error while the server drains, even /health.

    A load balancer then stops sending requests, and a client knows that it may retry elsewhere.
    """


class Drain:
    """The time that requests in flight have to finish, once the server is told to stop."""

    def __init__(self) -> None:
        self.deadline_s: float | None = None  # None until draining begins

    def begin(self) -> None:
        self.deadline_s = time.monotonic() + DRAIN_S

    @property
    def is_over(self) -> bool:
        return self.deadline_s is not None and time.monotonic() >= self.deadline_s

    def check(self) -> None:
        """Raise Stopping if draining has begun."""
        if self.deadline_s is not None:
            raise Stopping("the server is stopping; send the request again")


class Server(uvicorn.Server):
    """Drains at the first signal to stop, and exits immediately at the second."""

    def __init__(self, config: uvicorn.Config, drain: Drain) -> None:
        super().__init__(config)
        self._drain = drain

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until the server is stopped, and let cancelled responses send their last bytes."""
        await super().serve(sockets)
        if self.server_state.tasks:  # uvicorn cancels them, but does not wait for them
            await asyncio.wait(self.server_state.tasks, timeout=1)

    def handle_exit(self, sig: int, _frame: FrameType | None) -> None:
        if self._drain.deadline_s is None:
            self._drain.begin()
            return
        signal.signal(sig, signal.SIG_DFL)  # the runtimes exit when their sockets close
        signal.raise_signal(sig)

    async def on_tick(self, counter: int) -> bool:
        """Decide, ten times a second, whether to stop accepting connections."""
        if self._drain.deadline_s is not None and not self.server_state.tasks:
            self.should_exit = True
        if self._drain.is_over:
            self.should_exit = True
            self.config.timeout_graceful_shutdown = 0  # the requests have had their time
        return await super().on_tick(counter)
