"""The body of a streamed answer, written without a task's turn of the event loop."""

from __future__ import annotations

import weakref

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

BODY_WRITER = "rekindle.body_writer"  # in the scope


class BodyWriter:
    """Does what ASGI's `send` does with a part of a body, where that has nothing to wait for.
    Calling `send` through every layer of the application costs more than making the part."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = weakref.ref(cycle)  # whose scope has this

    @property
    def is_ready(self) -> bool:
        """Whether the headers are sent, the body goes on, and the client reads it."""
        cycle = self._cycle()
        return cycle is not None and bool(
            cycle.chunked_encoding
            and not cycle.response_complete
            and not cycle.disconnected
            and not cycle.flow.write_paused
            and not cycle.transport.is_closing()
        )

    def write(self, part: bytes) -> None:
        cycle = self._cycle()
        if part and cycle is not None:  # one of no bytes would be the end
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part))
