"""Runs the child process of a model, restarts it when it dies, and ends it when it is stuck."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import signal
import socket
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Callable
from dataclasses import dataclass

from rekindle.errors import ModelError, RuntimeDied
from rekindle.protocol.admin import AdminReply
from rekindle.protocol.frames import (
    Events,
    FrameReader,
    Heartbeat,
    LoadFailed,
    Loading,
    LogLine,
    Ready,
    ToFront,
    ToRuntime,
    frame,
)
from rekindle.protocol.requests import LoadModel, Stop

OnLoading = Callable[[float], None]
AfterLoading = Events | AdminReply | LogLine | Heartbeat
OnMessage = Callable[[AfterLoading], None]
States = asyncio.Queue[ToFront | None]  # messages about loading; None when the socket is closed


@dataclass(slots=True)
class WorkerProcess:
    """A process from `spawn` to `died` or `stop`. `on_message` gets messages about turns."""

    _name: str
    _process: Process
    _transport: asyncio.WriteTransport
    _states: States
    _is_loaded: bool = False

    @classmethod
    async def spawn(cls, name: str, load: LoadModel, on_message: OnMessage) -> WorkerProcess:
        """Start the process, and tell it what to load."""
        states: States = asyncio.Queue()

        def receive(message: ToFront | None) -> None:
            match message:
                case Events() | AdminReply() | LogLine() | Heartbeat():
                    on_message(message)
                case _:
                    states.put_nowait(message)

        ours, theirs = socket.socketpair()
        with theirs:
            loop = asyncio.get_running_loop()
            transport, _ = await loop.create_connection(lambda: FrameReader(receive), sock=ours)
            command = [sys.executable, "-m", "rekindle.runtime.main", str(theirs.fileno())]
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # a terminal's Ctrl-C must not reach its imports
                )
            except BaseException:
                transport.close()  # a process that has started stops by itself
                raise
        worker = cls(name, process, transport, states)
        worker.send(load)
        return worker

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def unsent_bytes(self) -> int:
        """The size of the messages that the process has not read yet."""
        return 0 if self._transport.is_closing() else self._transport.get_write_buffer_size()

    def send(self, message: ToRuntime) -> None:
        """Send a message, unless the process has just died, which `died` will report."""
        if not self._transport.is_closing():  # uvloop would raise; asyncio would only log
            self._transport.write(frame(message))

    async def ready(self, on_loading: OnLoading) -> Ready:
        """Wait until the model is loaded. Raises ModelError."""
        while True:
            match await self._states.get():
                case Loading(fraction):
                    on_loading(fraction)
                case Ready() as ready:
                    self._is_loaded = True
                    return ready
                case LoadFailed(message):
                    raise ModelError(message)
                case _:
                    status = await self._process.wait()
                    raise ModelError(
                        f"the runtime of {self._name} died while loading (exit status {status}): "
                        "the model file may be damaged, or memory too small"
                    )

    async def died(self) -> int:
        """Wait until the process ends by itself, and return its exit status."""
        while await self._states.get() is not None:
            pass
        return await self._process.wait()

    async def stop(self) -> None:
        """Ask the process to stop. Kill it if it has not written its state to disk in 120 s.

        A process that is still loading has no state to write, and would not read the message."""
        if self._is_loaded:
            self.send(Stop())
            await self._wait_or_kill(120)
        else:
            self._kill()
            await self._process.wait()
        self.close()

    async def abort(self) -> None:
        """End a stuck process. It gets 5 s to print its stack traces to standard error."""
        self._process.send_signal(signal.SIGABRT)
        await self._wait_or_kill(5)

    async def _wait_or_kill(self, limit_s: float) -> None:
        try:
            await asyncio.wait_for(self._process.wait(), limit_s)
        except TimeoutError:
            self._kill()
            await self._process.wait()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            self._process.kill()

    def close(self) -> None:
        """Close the socket. A process that still runs stops by itself."""
        self._transport.close()


log = logging.getLogger("rekindle.runtime")

RESTART_DELAYS_S = (0.1, 1.0, 5.0, 30.0)  # the last one repeats
WATCH_INTERVAL_S = 1.0

OnEnd = Callable[[RuntimeDied], None]


class Watchdog:
    """Detects a process that makes no progress.

    A heartbeat says how long the main thread has been busy with its current step, or an encoder
    with its current request. A thread that is stuck while it holds the interpreter lock prevents
    heartbeats, so their absence counts as well.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._heartbeat_s = clock()
        self._working_s = 0.0  # at the time of the heartbeat
        self.fired = 0

    def heartbeat(self, working_s: float = 0.0) -> None:
        self._heartbeat_s, self._working_s = self._clock(), working_s

    @property
    def stalled_s(self) -> float:
        """For how long there may have been no progress."""
        return self._clock() - self._heartbeat_s + self._working_s

    def fires(self) -> bool:
        """Whether the process is stuck. Counts it if so."""
        is_stuck = self.stalled_s > self._limit_s
        self.fired += is_stuck
        return is_stuck


class Supervisor:
    """Runs one process at a time.

    `on_message` receives its messages once the model is loaded. `on_end` is called when the process
    has ended, with the error for its open requests.
    """

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
        self.ready: Ready | None = None  # None while no model is loaded
        self.described: Ready | None = None  # the last `ready`, also after unloading
        self.down_reason = "a model is loading"
        self.restarts = 0
        self.failed_restarts = 0  # since the process last ended

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process else None

    async def start(self, load: LoadModel, on_loading: OnLoading) -> None:
        """Load the model. Raises ModelError. If it fails or is cancelled, no process remains."""
        self._load = load
        try:
            process = await self._spawn(on_loading)
        except BaseException:
            await asyncio.shield(self.stop())
            raise
        self._watcher = asyncio.create_task(self._watch(process))

    def disable(self) -> None:
        """Accept no more requests and stop restarting the process."""
        self.ready = None
        if self._watcher:
            self._watcher.cancel()

    async def stop(self) -> None:
        """End the process. Afterwards the model can be started again."""
        process = self.process
        if process is not None:
            await process.stop()
        if self.process is process:
            self.process = None

    async def _spawn(self, on_loading: OnLoading) -> WorkerProcess:
        if self.process is not None:
            self.process.close()
        self.process = await WorkerProcess.spawn(self._name, self._load, self._on_message)
        self.described = self.ready = await self.process.ready(on_loading)
        self.watchdog.heartbeat()
        return self.process

    async def _watch(self, process: WorkerProcess) -> None:
        """When the process dies, fail its turns and start another one."""
        while True:
            end = await self._wait_for_end(process)
            self._on_end(
                RuntimeDied(
                    f"the process running model {self._name} {end} and is being restarted; "
                    "send the request again"
                )
            )
            process = await self._restart()

    async def _wait_for_end(self, process: WorkerProcess) -> str:
        """Return how the process ended. If it is stuck, end it."""
        died = asyncio.create_task(process.died())
        try:
            while not died.done() and not self.watchdog.fires():
                await asyncio.wait({died}, timeout=WATCH_INTERVAL_S)
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
        delays_s = itertools.chain(RESTART_DELAYS_S, itertools.repeat(RESTART_DELAYS_S[-1]))
        while True:
            await asyncio.sleep(next(delays_s))
            try:
                process = await self._spawn(lambda _fraction: None)
            except (ModelError, OSError) as error:
                self.failed_restarts += 1
                self.down_reason = "a model cannot be restarted; the server's log says why"
                log.error("restarting %s failed: %s", self._name, error)
            else:
                self.restarts += 1
                self.failed_restarts = 0
                log.warning("runtime of %s is back", self._name)
                return process
