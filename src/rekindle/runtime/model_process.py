"""Runs the threads and the main loop that every model process has, and its socket to the front.

Threads: a reader and a writer for the socket, a few encoders that turn requests into tokens, one
that sends heartbeats, and the main thread. Only the main thread uses the model.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from rekindle.errors import as_server_error
from rekindle.protocol.admin import AdminReply, AdminRequest, Detokenize, Tokenize
from rekindle.protocol.events import Cancelled, Event, Failed
from rekindle.protocol.frames import Events, Heartbeat, Ready, Received, ToFront, TurnRequest, frame
from rekindle.protocol.requests import Cancel, LoadModel, Stop
from rekindle.runtime.encode.threads import Encoders, Job, Tokenisation

HEARTBEAT_S = 1.0

T = TypeVar("T")


class Link:
    """Sends messages to the front. Any thread may send, and none waits for the front to read."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sending = threading.Lock()
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()  # bytes the socket did not accept
        self._unsent_frames = 0  # in the outbox or being written by the writer thread
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()
        #: When the main thread began its current work, or None while it waits for messages.
        self.working_since_s: float | None = None

    def send(self, message: ToFront) -> None:
        """Send a message, in the order of the calls.

        The caller writes to the socket itself, because waking a writer thread costs more. If the
        front is gone, the reader thread notices.
        """
        data = frame(message)
        with self._sending:
            sent = self._send_some(data) if not self._unsent_frames else 0
            if sent < len(data):
                self._unsent_frames += 1
                self._outbox.put(data[sent:])

    def _send_some(self, data: bytes) -> int:
        """Write without waiting. Returns the number of bytes that the socket accepted."""
        try:
            return self._sock.send(data, socket.MSG_DONTWAIT)
        except (BrokenPipeError, ConnectionResetError):
            return len(data)
        except OSError:  # the socket's buffer or the system's memory is full
            return 0

    def _write(self) -> None:
        """Run the writer thread, which has work only while the front reads too slowly."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while (data := self._outbox.get()) is not None:
                self._sock.sendall(data)
                with self._sending:
                    self._unsent_frames -= 1

    def close(self) -> None:
        """Return when everything has been sent."""
        self._outbox.put(None)
        self._writer.join()


class ModelProcess(ABC, Generic[T]):
    """Serves one model until the front closes the socket.

    `T` is the type of the messages that the main thread handles, other than `Stop`.
    """

    tokenisation: Tokenisation  # set by the subclass, once it has loaded the model

    def __init__(self, sock: socket.socket) -> None:
        self.link = Link(sock)
        self._inbox: SimpleQueue[T | Stop] = SimpleQueue()
        self._encoders: Encoders[T | Failed | AdminReply] = Encoders(self._deliver)
        self.daemons: tuple[Callable[[], None], ...] = (self._send_heartbeats,)

    @abstractmethod
    def ready(self) -> Ready:
        """Describe the loaded model."""

    @abstractmethod
    def _receive(self, message: TurnRequest | AdminRequest | Cancel, size_bytes: int) -> None:
        """Encode a request or put it into the inbox. Called on the reader thread."""

    @abstractmethod
    def _handle(self, message: T) -> None:
        """Handle a message of the inbox."""

    @abstractmethod
    def _step(self) -> bool:
        """Do one step of work. Returns False when there is nothing more to do."""

    @abstractmethod
    def close(self) -> None:
        """Close the link before the model: if closing the model crashes, all is sent already."""

    @property
    def _max_wait_s(self) -> float | None:
        """How long an idle process may wait for a message. None means for ever."""
        return None

    @property
    def disk_state(self) -> str:
        """The state of the disk tier. It is off for models without one."""
        return "off"

    def _send_heartbeats(self) -> None:
        """Run the thread that tells the front whether this process makes progress."""
        while True:
            now_s = time.monotonic()
            encoding_s, engine_s = (
                max(now_s - since_s, 0.0) if since_s is not None else 0.0
                for since_s in (self._encoders.working_since_s, self.link.working_since_s)
            )
            self.link.send(Heartbeat(max(encoding_s, engine_s), encoding_s, self.disk_state))
            time.sleep(HEARTBEAT_S)

    def emit(self, events: list[Event]) -> None:
        self.link.send(Events(events))

    def read(self, received: Iterator[Received]) -> None:
        """Run the reader thread."""
        with contextlib.suppress(ConnectionResetError):
            for message, size_bytes in received:
                match message:
                    case Cancel(turn) if self._encoders.cancel(turn):
                        pass
                    case Stop():
                        self._inbox.put(message)
                    case AdminRequest(op=Tokenize() | Detokenize()):
                        reply = partial(self.tokenisation.reply, message)
                        self._encode(message, size_bytes, reply, "encoding the text")
                    case LoadModel():
                        raise AssertionError("a process loads one model")
                    case _:
                        self._receive(message, size_bytes)
        self._inbox.put(Stop())  # the front is gone

    def _encode(
        self,
        message: TurnRequest | AdminRequest,
        size_bytes: int,
        encode: Callable[[], Sequence[T | Failed | AdminReply]],
        what: str,
        turns: tuple[int, ...] = (),
        *,
        is_constrained: bool = False,
    ) -> None:
        """Encode a request on an encoder thread. `what` names the work in the log if it fails."""

        def results() -> Sequence[T | Failed | AdminReply]:
            try:
                return encode()
            except Exception as error:
                failure = as_server_error(error, what).info
            if isinstance(message, AdminRequest):
                return [AdminReply(message.id, error=failure)]
            return [Failed(turn, failure) for turn in turns]

        self._encoders.submit(Job(message.salt, size_bytes, results, turns, is_constrained))

    def _deliver(self, encoded: T | Failed | AdminReply | Cancelled) -> None:
        """Pass on an encoder's result. Called on an encoder thread or the reader thread."""
        match encoded:
            case AdminReply():
                self.link.send(encoded)
            case Failed() | Cancelled():
                self.emit([encoded])
            case _:
                self._inbox.put(encoded)

    def run(self) -> None:
        """Run the main thread: step while there is work, otherwise wait for a message."""
        busy = True
        while True:
            for message in self._messages(wait=not busy):
                self.link.working_since_s = time.monotonic()
                if isinstance(message, Stop):
                    return
                self._handle(message)
            self.link.working_since_s = time.monotonic()
            busy = self._step()
            self.link.working_since_s = None

    def _messages(self, *, wait: bool) -> Iterator[T | Stop]:
        if wait:
            with contextlib.suppress(Empty):
                yield self._inbox.get(timeout=self._max_wait_s)
        while not self._inbox.empty():  # only this thread takes messages out
            yield self._inbox.get_nowait()


PIECE_ENTRIES = 256  # number of cache entries that one piece of work looks at

Pieces = Generator[None, None, T]  # work that yields after each piece, and its result


class Background:
    """Runs work that belongs to no turn on the engine's thread, between two steps.

    Each time it works for `budget_s`, plus the rest of one piece at most.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, budget_s: float = 0.002
    ) -> None:
        """An engine step takes at least ten times as long as the default budget."""
        self._clock = clock
        self._budget_s = budget_s
        self._works: deque[Pieces[None]] = deque()

    def add(self, work: Pieces[None]) -> None:
        self._works.append(work)

    @property
    def has_work(self) -> bool:
        return bool(self._works)

    def run(self) -> bool:
        """Do one piece of each work in turn until the budget is spent. Returns `has_work`."""
        if not self._works:
            return False
        until = self._clock() + self._budget_s
        while self._works:
            work = self._works.popleft()
            try:
                next(work)
            except StopIteration:
                pass
            else:
                self._works.append(work)
            if self._clock() >= until:
                break
        return self.has_work
