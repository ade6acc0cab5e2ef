"""The runtime's end of the socket: what is sent, and the signs of life."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from queue import SimpleQueue

from rekindle.protocol.frames import Heartbeat, ToFront, frame

HEARTBEAT_S = 1.0


class Link:
    """Any thread may send."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._outbox: SimpleQueue[ToFront | None] = SimpleQueue()
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()
        #: When the engine's thread took up its current work; None: it is at rest.
        self.working_since_s: float | None = None

    def send(self, message: ToFront) -> None:
        """Leave the message to the writer. Sending it here would wake the front, which then takes
        the core from us between two steps; the writer runs while the engine computes."""
        self._outbox.put(message)

    def _write(self) -> None:
        """The writer thread; a front that is gone is noticed by the reader."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while (message := self._outbox.get()) is not None:
                self._sock.sendall(frame(message))

    def beat(self) -> None:
        """The thread that tells the front whether the engine's makes progress."""
        while True:
            since_s = self.working_since_s
            self.send(Heartbeat(time.monotonic() - since_s if since_s is not None else 0.0))
            time.sleep(HEARTBEAT_S)

    def close(self) -> None:
        """Return when everything has been sent."""
        self._outbox.put(None)
        self._writer.join()
