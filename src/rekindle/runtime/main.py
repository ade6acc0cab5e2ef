"""The runtime process: one loaded model behind a socket.

Threads: a reader and a writer at the socket, a few encoders that turn requests into tokens, those
of the disk tier, one that ticks, and the main thread, which alone owns the engine and the cache.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

from rekindle.chat.tools.registry import check_names
from rekindle.engine.base import EngineOptions
from rekindle.engine.registry import load_engine
from rekindle.errors import RekindleError, ServerError
from rekindle.kvcache.tiers.base import TierEvent
from rekindle.protocol.admin import AdminReply, AdminRequest, AdminResult, IndexPrompt, Validate
from rekindle.protocol.events import Event, Failed
from rekindle.protocol.frames import (
    Events,
    LoadFailed,
    Loading,
    LogLine,
    Ready,
    ToFront,
    ToRuntime,
    frame,
    receive,
)
from rekindle.protocol.requests import Cancel, GenerateRequest, LoadModel, Stop
from rekindle.runtime.build import Runtime, build, formats
from rekindle.runtime.request import EncodedPrompt
from rekindle.runtime.storage import open_storage
from rekindle.runtime.turn import Stopwatch, Turn

ENCODER_THREADS = 2
TICK_S = 60.0


@dataclass(frozen=True, slots=True)
class _Arrived:
    """A request is being encoded."""

    turn: int


@dataclass(frozen=True, slots=True)
class _Refused:
    """A request could not be encoded; its client has the error."""

    turn: int


@dataclass(frozen=True, slots=True)
class _ReadyAdmin:
    """An admin request, with its prompt encoded if it is about one."""

    request: AdminRequest
    prompt: EncodedPrompt | None = None


class _Tick:
    """A minute has gone by."""


_Message = _Arrived | _Refused | Turn | _ReadyAdmin | Cancel | _Tick | TierEvent | Stop


class RuntimeProcess:
    """Serves one model until the front hangs up."""

    def __init__(self, load: LoadModel, sock: socket.socket) -> None:
        self._sock = sock
        self._outbox: SimpleQueue[ToFront | None] = SimpleQueue()
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()
        self._inbox: SimpleQueue[_Message] = SimpleQueue()
        self._encoding: set[int] = set()  # turns between arrival and the scheduler
        self._cancelled: set[int] = set()  # of those, the ones cancelled meanwhile
        check_names(*formats(load.settings))  # before anything slow
        engine = load_engine(_options(load), lambda fraction: self.send(Loading(fraction)))
        storage = open_storage(load, engine.capabilities, self._inbox.put, self.send)
        self._runtime: Runtime = build(engine, storage, emit=self._emit, log=self.send)

    def ready(self) -> Ready:
        capabilities = self._runtime.engine.capabilities
        return Ready(
            context_tokens=capabilities.context_tokens,
            pool_tokens=capabilities.pool_tokens,
            has_template=self._runtime.engine.chat_template is not None,
        )

    # -- out -----------------------------------------------------------------------------------

    def send(self, message: ToFront) -> None:
        """Leave the message to the writer. Sending it here would wake the front, which then takes
        the core from us between two steps; the writer runs while the engine computes."""
        self._outbox.put(message)

    def _write(self) -> None:
        """The writer thread; a front that is gone is noticed by the reader."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while (message := self._outbox.get()) is not None:
                self._sock.sendall(frame(message))

    def _emit(self, events: list[Event]) -> None:
        self.send(Events(events))

    def _fail(self, turn: int, error: ServerError) -> None:
        self._emit([Failed(turn, error.info)])

    def _reply(self, request: AdminRequest, result: AdminResult | ServerError) -> None:
        if isinstance(result, ServerError):
            self.send(AdminReply(request.id, error=result.info))
        else:
            self.send(AdminReply(request.id, result))

    # -- in ------------------------------------------------------------------------------------

    def read(self, messages: Iterator[ToRuntime]) -> None:
        """The reader thread."""
        encoders = ThreadPoolExecutor(ENCODER_THREADS, "encoder")
        try:
            for message in messages:
                match message:
                    case GenerateRequest():
                        for turn in message.turns:
                            self._inbox.put(_Arrived(turn))
                        encoders.submit(self._encode, message, Stopwatch(message.received_s))
                    case AdminRequest() if isinstance(message.op, Validate | IndexPrompt):
                        encoders.submit(self._encode_admin, message)
                    case AdminRequest():
                        self._inbox.put(_ReadyAdmin(message))
                    case Cancel() | Stop():
                        self._inbox.put(message)
        finally:
            self._inbox.put(Stop())  # a runtime without a front must not go on

    def _encode(self, request: GenerateRequest, stopwatch: Stopwatch) -> None:
        """An encoder thread: the request as its turns, or their refusal."""
        try:
            turns = self._runtime.pipeline.encode_choices(request, stopwatch)
        except Exception as error:
            for turn in request.turns:
                self._fail(turn, _as_server_error(error, "encoding the prompt"))
                self._inbox.put(_Refused(turn))
        else:
            for ready in turns:
                self._inbox.put(ready)

    def _encode_admin(self, request: AdminRequest) -> None:
        """An encoder thread: the prompt that an admin request is about."""
        assert isinstance(request.op, Validate | IndexPrompt)
        try:
            prompt = self._runtime.input_processor.encode_about(request.op, request.salt)
        except Exception as error:
            self._reply(request, _as_server_error(error, "encoding the prompt"))
        else:
            self._inbox.put(_ReadyAdmin(request, prompt))

    # -- the engine's thread -------------------------------------------------------------------

    def run(self) -> None:
        """Step while there is work; sleep on the inbox while there is none."""
        busy = True
        while True:
            for message in self._messages(wait=not busy):
                if isinstance(message, Stop):
                    return
                self._handle(message)
            busy = self._runtime.scheduler.step()
            self._runtime.storage.give_way(busy)

    def _messages(self, *, wait: bool) -> Iterator[_Message]:
        if wait:
            yield self._inbox.get()
        with contextlib.suppress(Empty):
            while True:
                yield self._inbox.get_nowait()

    def _handle(self, message: _Message) -> None:
        match message:
            case _Arrived(turn):
                self._encoding.add(turn)
            case _Refused(turn):
                self._encoding.discard(turn)
                self._cancelled.discard(turn)
            case Cancel(turn):
                if turn in self._encoding:
                    self._cancelled.add(turn)
                else:
                    self._runtime.scheduler.cancel(turn)
            case Turn():
                self._submit(message)
            case _ReadyAdmin(request, prompt):
                self._administer(request, prompt)
            case _Tick():
                self._runtime.storage.tick()
            case Stop():
                raise AssertionError("handled by run")
            case _:
                self._runtime.storage.on_event(message)

    def _submit(self, turn: Turn) -> None:
        is_cancelled = turn.id in self._cancelled
        self._encoding.discard(turn.id)
        self._cancelled.discard(turn.id)
        try:
            self._runtime.pipeline.find(turn)
        except ServerError as error:
            self._fail(turn.id, error)
            return
        self._runtime.scheduler.submit(turn)
        if is_cancelled:
            self._runtime.scheduler.cancel(turn.id)

    def _administer(self, request: AdminRequest, prompt: EncodedPrompt | None) -> None:
        """An admin request must not cost the turns that are running."""
        try:
            self._runtime.admin.answer(request, prompt, lambda result: self._reply(request, result))
        except ServerError as error:
            self._reply(request, error)
        except Exception as error:
            self.send(LogLine("error", f"an admin request failed: {error!r}"))
            self._reply(request, ServerError("the request failed; see the log"))

    def tick(self) -> None:
        """The ticking thread."""
        while True:
            time.sleep(TICK_S)
            self._inbox.put(_Tick())

    def close(self) -> None:
        """The engine is closed last: whatever its end is like, everything has been sent."""
        self._runtime.close()
        self._outbox.put(None)
        self._writer.join()
        self._runtime.engine.close()


def _options(load: LoadModel) -> EngineOptions:
    settings = load.settings
    return EngineOptions(
        path=Path(load.path),
        parallel=settings.parallel,
        context_tokens=settings.max_model_len,
        kv_fraction=settings.kv_fraction,
        threads=settings.thread_count,
        gpu_layers=settings.gpu_layers,
        kv_type=settings.kv_type,
    )


def _as_server_error(error: Exception, doing: str) -> ServerError:
    return error if isinstance(error, ServerError) else ServerError(f"{doing} failed: {error!r}")


def main() -> None:
    """Entry point of the child process; its one argument is the socket's descriptor."""
    for stop in (signal.SIGINT, signal.SIGTERM):  # the front decides when we end: when it says
        signal.signal(stop, signal.SIG_IGN)  # so, or by hanging up
    sock = socket.socket(fileno=int(sys.argv[1]))
    messages = receive(sock)
    load = next(messages)
    assert isinstance(load, LoadModel)
    try:
        process = RuntimeProcess(load, sock)
    except RekindleError as error:
        sock.sendall(frame(LoadFailed(str(error))))
        return
    process.send(process.ready())
    threading.Thread(target=process.read, args=(messages,), daemon=True).start()
    threading.Thread(target=process.tick, daemon=True).start()
    process.run()
    process.close()
    sys.stdout.flush()
    os._exit(0)  # encoder threads may be in the middle of a template


if __name__ == "__main__":
    main()
