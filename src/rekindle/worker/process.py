"""The child process that runs one model, and the socket to it."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Callable

from rekindle.errors import ModelError
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

ABORT_S = 5.0  # for a runtime to show where it stands
STOP_S = 120.0  # for a runtime to write its state to disk

OnLoading = Callable[[float], None]
AfterLoading = Events | AdminReply | LogLine | Heartbeat
OnMessage = Callable[[AfterLoading], None]
States = asyncio.Queue[ToFront | None]  # of loading; None: the process has closed its socket


class WorkerProcess:
    """Lives from `spawn` to `died` or `stop`; messages about turns go to `on_message`."""

    def __init__(
        self, name: str, process: Process, transport: asyncio.WriteTransport, states: States
    ) -> None:
        self._name = name
        self._process = process
        self._transport = transport
        self._states = states

    @classmethod
    async def spawn(cls, name: str, load: LoadModel, on_message: OnMessage) -> WorkerProcess:
        """Start the process and send it what to load."""
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
            process = await asyncio.create_subprocess_exec(*command, pass_fds=[theirs.fileno()])
        runtime = cls(name, process, transport, states)
        runtime.send(load)
        return runtime

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def unsent_bytes(self) -> int:
        """What was sent and the process has not read yet."""
        return 0 if self._transport.is_closing() else self._transport.get_write_buffer_size()

    def send(self, message: ToRuntime) -> None:
        """Nothing is sent to a process that has just gone: `died` will tell."""
        if not self._transport.is_closing():  # uvloop raises, where asyncio would only log
            self._transport.write(frame(message))

    async def ready(self, on_loading: OnLoading) -> Ready:
        """What the model is like, once it is loaded; raises ModelError when it cannot be."""
        while True:
            match await self._states.get():
                case Loading(fraction):
                    on_loading(fraction)
                case Ready() as ready:
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
        """Wait for the end of a process that nobody stopped; returns its exit status."""
        while await self._states.get() is not None:
            pass
        return await self._process.wait()

    async def stop(self) -> None:
        """End the process: by a message first, by force when that takes too long."""
        self.send(Stop())
        try:
            await asyncio.wait_for(self._process.wait(), STOP_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        self.close()

    async def abort(self) -> None:
        """End a process that makes no progress; where it stands is on the standard error."""
        self._process.send_signal(signal.SIGABRT)
        try:
            await asyncio.wait_for(self._process.wait(), ABORT_S)
        except TimeoutError:
            self._process.kill()

    def close(self) -> None:
        """Close the socket; a process that still runs ends by itself."""
        self._transport.close()
