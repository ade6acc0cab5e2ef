"""The process of a model, kept running: started again when it dies, ended when it is stuck."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable

from rekindle.errors import ModelError, RuntimeDied
from rekindle.protocol.frames import Ready
from rekindle.protocol.requests import LoadModel
from rekindle.worker.process import OnLoading, OnMessage, WorkerProcess

# ----------------------------------------------------------------------
# Whether a runtime makes progress: by what it says of itself, and by its silence.


class Watchdog:
    """A heartbeat says how long the engine's thread has been at its current work. What is stuck
    while it holds the interpreter's lock sends none; that adds up to the same."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._heard_s = clock()
        self._working_s = 0.0  # when it was heard
        self.fired = 0

    def hear(self, working_s: float = 0.0) -> None:
        """A sign of life, and how long the runtime has been at its current work."""
        self._heard_s, self._working_s = self._clock(), working_s

    @property
    def stalled_s(self) -> float:
        """How long there may have been no progress."""
        return self._clock() - self._heard_s + self._working_s

    def fires(self) -> bool:
        """Whether there was none for too long; counts it if so."""
        is_stuck = self.stalled_s > self._limit_s
        self.fired += is_stuck
        return is_stuck


log = logging.getLogger("rekindle.runtime")

RESTART_DELAYS_S = (0.1, 1.0, 5.0, 30.0)  # the last one repeats
WATCH_S = 1.0  # between two looks at whether there is progress

OnEnd = Callable[[RuntimeDied], None]


class Supervisor:
    """`on_message` gets what the process sends once its model is loaded, `on_end` why nobody will
    answer what it was asked."""

    def __init__(
        self,
        name: str,
        load: LoadModel,
        on_message: OnMessage,
        on_end: OnEnd,
        *,
        step_timeout_s: float,
    ) -> None:
        self._name = name
        self._load = load
        self._on_message = on_message
        self._on_end = on_end
        self._watcher: asyncio.Task[None] | None = None
        self.watchdog = Watchdog(step_timeout_s)
        self.process: WorkerProcess | None = None
        self.ready: Ready | None = None
        self.down_reason = "a model is loading"  # as long as there is none that is ready
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process else None

    async def start(self, on_loading: OnLoading) -> None:
        """Load the model; raises ModelError when it cannot be loaded."""
        self._watcher = asyncio.create_task(self._watch(await self._spawn(on_loading)))

    def give_up(self) -> None:
        """It is about to be stopped: nothing more is asked of it, nor is it started again."""
        self.ready = None
        if self._watcher:
            self._watcher.cancel()

    async def stop(self) -> None:
        self.give_up()
        if self.process is not None:
            await self.process.stop()

    async def _spawn(self, on_loading: OnLoading) -> WorkerProcess:
        if self.process is not None:
            self.process.close()
        self.process = await WorkerProcess.spawn(self._name, self._load, self._on_message)
        self.ready = await self.process.ready(on_loading)
        self.watchdog.hear()
        return self.process

    async def _watch(self, process: WorkerProcess) -> None:
        """When the process dies, fail its turns and start it again."""
        while True:
            end = await self._end_of(process)
            self._on_end(
                RuntimeDied(
                    f"the process running model {self._name} {end} and is being restarted; "
                    "send the request again"
                )
            )
            process = await self._restart()

    async def _end_of(self, process: WorkerProcess) -> str:
        """How a process ended that nobody stopped; one that is stuck is ended."""
        died = asyncio.create_task(process.died())
        try:
            while not died.done() and not self.watchdog.fires():
                await asyncio.wait({died}, timeout=WATCH_S)
            is_stuck = not died.done()
            end = f"made no progress for {self.watchdog.stalled_s:.0f} s" if is_stuck else "died"
            self.down_reason = f"the process of a model {end} and is being restarted"
            self.ready = None
            if is_stuck:
                await process.abort()
            end += f" (exit status {await died})"
        finally:
            died.cancel()
        log.error("runtime of %s %s; restarting it", self._name, end)
        return end

    async def _restart(self) -> WorkerProcess:
        for attempt in itertools.count():
            await asyncio.sleep(RESTART_DELAYS_S[min(attempt, len(RESTART_DELAYS_S) - 1)])
            try:
                process = await self._spawn(lambda _fraction: None)
            except (ModelError, OSError) as error:
                log.error("restarting %s failed: %s", self._name, error)
            else:
                self.restarts += 1
                log.warning("runtime of %s is back", self._name)
                return process
        raise AssertionError("unreachable")
