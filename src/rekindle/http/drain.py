"""The end of a server: what is in flight finishes or is told why not, what is new is refused."""

from __future__ import annotations

import signal
import time
from types import FrameType

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from rekindle.errors import Unavailable
from rekindle.http.responses import ErrorResponse

DRAIN_S = 10  # for requests in flight to finish


class Drain:
    """Once it has begun, every new request is refused, that for /health included: so a balancer
    turns away, and a client with a connection still open knows that it may try elsewhere."""

    def __init__(self) -> None:
        self.deadline_s: float | None = None  # None: it has not begun

    def begin(self) -> None:
        self.deadline_s = time.monotonic() + DRAIN_S

    @property
    def is_over(self) -> bool:
        return self.deadline_s is not None and time.monotonic() >= self.deadline_s

    def guard(self, app: ASGIApp) -> ASGIApp:
        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            if self.deadline_s is None or scope["type"] != "http":
                await app(scope, receive, send)
                return
            stopping = Unavailable("the server is stopping; send the request again")
            refusal = ErrorResponse(stopping, scope)
            refusal.headers["connection"] = "close"
            await refusal(scope, receive, send)

        return guarded


class Server(uvicorn.Server):
    """Drains at the first signal to stop; ends at once at the second."""

    def __init__(self, config: uvicorn.Config, drain: Drain) -> None:
        super().__init__(config)
        self._drain = drain

    def handle_exit(self, sig: int, _frame: FrameType | None) -> None:
        if self._drain.deadline_s is None:
            self._drain.begin()
            return
        signal.signal(sig, signal.SIG_DFL)  # the runtimes see their sockets close, and end
        signal.raise_signal(sig)

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether to stop accepting connections."""
        if self._drain.deadline_s is not None and not self.server_state.tasks:
            self.should_exit = True
        if self._drain.is_over:
            self.should_exit = True
            self.config.timeout_graceful_shutdown = 0  # they had their time
        return await super().on_tick(counter)
