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
    """Any thread may send, and none waits for the front to read."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sending = threading.Lock()
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()  # what the socket had no room for
        self._behind = 0  # so many frames, or rests of them, of which the writer may have one
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()
        #: When the engine's thread took up its current work; None: it is at rest.
        self.working_since_s: float | None = None

    def send(self, message: ToFront) -> None:
        """Send the message, in the order of the calls; a front that is gone is noticed by the
        reader. The caller writes it: waking another thread to do so costs more than that."""
        data = frame(message)
        with self._sending:
            sent = self._send_some(data) if not self._behind else 0
            if sent < len(data):
                self._behind += 1
                self._outbox.put(data[sent:])

    def _send_some(self, data: bytes) -> int:
        """As much as the socket takes now."""
        try:
            return self._sock.send(data, socket.MSG_DONTWAIT)
        except (BrokenPipeError, ConnectionResetError):
            return len(data)
        except OSError:  # it has no room, or the system has none
            return 0

    def _write(self) -> None:
        """The writer thread, for when the front is behind with reading."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while (data := self._outbox.get()) is not None:
                self._sock.sendall(data)
                with self._sending:
                    self._behind -= 1

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
