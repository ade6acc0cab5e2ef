"""Extends uvicorn's HTTP protocol. All code that depends on uvicorn's internals is here.

Uvicorn waits for a request's headers without a time limit, keeps any number of them in memory, and
writes each chunk of a stream through every ASGI layer. This module limits the former two and offers
a shortcut for the latter.
"""

from __future__ import annotations

import asyncio
import weakref
from http import HTTPStatus
from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from rekindle.errors import BadRequest, ServerError
from rekindle.http.logs import REQUEST_ID_HEADER, fresh_id

BODY_WRITER = "rekindle.body_writer"  # the writer's key in the request's scope
MAX_HEADER_BYTES = 64 << 10
HEADERS_TIMEOUT_S = 30.0


class HeadersTooLarge(BadRequest):
    status, code = 431, "headers_too_large"

    def __init__(self) -> None:
        super().__init__(f"Headers may have at most {MAX_HEADER_BYTES} bytes together.")


class HeadersTooSlow(BadRequest):
    status, code = 408, "headers_too_slow"

    def __init__(self) -> None:
        seconds = f"{HEADERS_TIMEOUT_S:g} seconds"
        super().__init__(f"The request's headers did not arrive within {seconds}.")


class BodyWriter:
    """Writes a chunk of a streamed response directly to the connection, with chunked framing.

    ASGI's `send` does the same through every layer of the application, which costs more than
    producing the chunk. `send` remains the only way to start and end a response, and to wait for a
    slow client.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = weakref.ref(cycle)  # weak, because the cycle's scope holds this writer

    @property
    def is_ready(self) -> bool:
        """Whether the body has begun and not ended, and the client keeps up with reading."""
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
        if part and cycle is not None:  # an empty chunk would end the body
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part))


class HttpProtocol(HttpToolsProtocol):
    """One connection. It is closed if no request arrives in time; uvicorn closes idle ones."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deadline: asyncio.TimerHandle | None = None
        self._in_headers = False
        self._header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        # The timer also covers the rest of a refused body, and blank lines between requests.
        if self.cycle is None or self.cycle.response_complete:
            self._start_timer()
        super().data_received(data)
        # The middleware checks complete headers. This stops a client that never completes them.
        if self._in_headers:
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES:
                self._refuse(HeadersTooLarge())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers = True
        self._header_bytes = 0

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._stop_timer()
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:  # not an upgrade
            self.scope[BODY_WRITER] = BodyWriter(self.cycle)  # type: ignore[literal-required]

    def _start_timer(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(HEADERS_TIMEOUT_S, self._time_out)

    def _stop_timer(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _time_out(self) -> None:
        if self._in_headers:
            self._refuse(HeadersTooSlow())
        else:
            self.transport.close()

    def _refuse(self, error: ServerError) -> None:
        """Answer without the application, which has no request yet."""
        if self.transport.is_closing():
            return
        body = orjson.dumps(error.body())
        status = HTTPStatus(error.status)
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\n"
            "content-type: application/json\r\n"
            f"content-length: {len(body)}\r\n"
            f"{REQUEST_ID_HEADER}: {fresh_id()}\r\n"
            "connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
