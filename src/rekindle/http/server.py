"""Runs uvicorn, and stops it as clients need it: drain first, then end the rest with an error."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType

import uvicorn

from rekindle.http.middleware import Drain, RequestMiddleware

# Time that ended responses have to send their last bytes.
LAST_BYTES_S = 2.0

OnDrain = Callable[[int, float], None]  # requests in flight, and seconds left


class Server(uvicorn.Server):
    """Drains at the first signal to stop. At the second one, or when the time for draining is over,
    it ends the requests in flight with an error. The third one kills it."""

    def __init__(
        self,
        config: uvicorn.Config,
        app: RequestMiddleware,
        drain: Drain,
        on_drain: OnDrain = lambda _requests, _left_s: None,
    ) -> None:
        super().__init__(config)
        self.app = app
        self.drain = drain
        self._on_drain = on_drain
        self._ended_s: float | None = None  # when the requests in flight were ended

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until the server is stopped, and let cancelled responses send their last bytes."""
        await super().serve(sockets)
        if self.server_state.tasks:  # uvicorn cancels them, but does not wait for them
            await asyncio.wait(self.server_state.tasks, timeout=1)

    def handle_exit(self, sig: int, _frame: FrameType | None) -> None:
        if self.drain.deadline_s is None:
            self.drain.begin()
        elif not self.drain.is_over:
            self.drain.end()
        else:
            signal.signal(sig, signal.SIG_DFL)  # the runtimes exit when their sockets close
            signal.raise_signal(sig)

    async def on_tick(self, counter: int) -> bool:
        """Decide, ten times a second, whether to stop accepting connections."""
        deadline_s = self.drain.deadline_s
        if deadline_s is not None:
            tasks, now_s = self.server_state.tasks, time.monotonic()
            self._on_drain(len(tasks), max(deadline_s - now_s, 0.0))
            if self.drain.is_over and self._ended_s is None:
                self._ended_s = now_s
                for task in tasks:  # here, because uvicorn would log an error
                    task.cancel()
            if not tasks or (self._ended_s is not None and now_s > self._ended_s + LAST_BYTES_S):
                self.should_exit = True
        return await super().on_tick(counter)
