"""Starts and stops the child process of one model, and talks to it over a socket."""

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

OnLoading = Callable[[float], None]
AfterLoading = Events | AdminReply | LogLine | Heartbeat
OnMessage = Callable[[AfterLoading], None]
States = asyncio.Queue[ToFront | None]  # messages about loading; None when the socket is closed


class WorkerProcess:
    """A process from `spawn` to `died` or `stop`. `on_message` gets messages about turns."""

    def __init__(
        self, name: str, process: Process, transport: asyncio.WriteTransport, states: States
    ) -> None:
        self._name = name
        self._process = process
        self._transport = transport
        self._states = states

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
            process = await asyncio.create_subprocess_exec(*command, pass_fds=[theirs.fileno()])
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
        """Ask the process to stop. Kill it if it has not written its state to disk in 120 s."""
        self.send(Stop())
        try:
            await asyncio.wait_for(self._process.wait(), 120)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        self.close()

    async def abort(self) -> None:
        """End a stuck process. It gets 5 s to print its stack traces to standard error."""
        self._process.send_signal(signal.SIGABRT)
        try:
            await asyncio.wait_for(self._process.wait(), 5)
        except TimeoutError:
            self._process.kill()

    def close(self) -> None:
        """Close the socket. A process that still runs stops by itself."""
        self._transport.close()
