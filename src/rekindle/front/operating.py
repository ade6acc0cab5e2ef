"""Stops a server as its clients need it, says what it waits for, and reloads settings at SIGHUP."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType

import uvicorn
from rich.console import Console
from rich.status import Status

from rekindle.config import Config
from rekindle.errors import ConfigError
from rekindle.http.auth import Keys
from rekindle.http.middleware import Drain, RequestMiddleware

log = logging.getLogger("rekindle")

REPORT_EVERY_S = 10  # where the output is not a terminal

#: The settings that a running server can change.
CHANGEABLE = frozenset(
    ("admin_key", "allowed_host", "api_key", "cors_origin", "drain_timeout", "log_level")
)
#: Fields of Config that are not settings.
NOT_SETTINGS = frozenset(("given", "settings_file"))


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


class DrainReport:
    """Counts down on a terminal, and logs a line now and then elsewhere."""

    def __init__(self, console: Console, count_turns: Callable[[], int]) -> None:
        self._console = console
        self._count_turns = count_turns
        self._status: Status | None = None
        self._last: tuple[int, int, int] | None = None

    def __call__(self, requests: int, left_s: float) -> None:
        """Called ten times a second while the server drains."""
        now = (requests, self._count_turns(), math.ceil(left_s))
        if now == self._last:
            return
        last, self._last = self._last, now
        if not requests:
            self.end()
        elif self._console.is_terminal:
            self._show(_waiting_for(*now))
        elif last is None or (now[2] != last[2] and now[2] % REPORT_EVERY_S == 0):
            log.info("%s", _waiting_for(*now))

    def _show(self, text: str) -> None:
        if self._status is None:
            self._status = self._console.status(text)
            self._status.start()
        self._status.update(f"{text} Press Ctrl-C again to end them now.")

    def end(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None


def _waiting_for(requests: int, turns: int, left_s: int) -> str:
    of_turns = f" with {_count(turns, 'turn')}" if turns else ""
    if not left_s:
        return f"Stopping: {_count(requests, 'request')}{of_turns} end with an error."
    return f"Stopping: waiting for {_count(requests, 'request')}{of_turns}, at most {left_s} s."


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


class Reloader:
    """Reads the settings and the keys again. Invalid ones change nothing."""

    def __init__(
        self,
        config: Config,
        load: Callable[[], Config],
        *,
        keys: Keys,
        app: RequestMiddleware,
        drain: Drain,
    ) -> None:
        """`load` reads and checks the settings; raises ConfigError."""
        self._config = config
        self._load = load
        self._keys = keys
        self._app = app
        self._drain = drain

    def reload(self) -> None:
        try:
            new = self._load()
        except ConfigError as error:
            log.error("the settings and keys stay as they are: %s", error)
            return
        changed = sorted(
            field.name
            for field in dataclasses.fields(Config)
            if field.name not in NOT_SETTINGS
            and getattr(new, field.name) != getattr(self._config, field.name)
        )
        now = [name for name in changed if name in CHANGEABLE]
        self._config = dataclasses.replace(
            self._config, **{name: getattr(new, name) for name in now}
        )
        self._keys.replace(self._config.api_key, admin=self._config.admin_key)
        self._app.allow(self._config.allowed_host, self._config.cors_origin)
        self._drain.timeout_s = self._config.drain_timeout
        if "log_level" in now:
            logging.getLogger().setLevel(self._config.log_level.upper())
        log.info("reloaded keys and settings; changed: %s", ", ".join(now) or "no setting")
        if later := [name for name in changed if name not in CHANGEABLE]:
            log.warning("these settings change at the next start only: %s", ", ".join(later))
