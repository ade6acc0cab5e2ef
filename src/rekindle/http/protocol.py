"""Extends uvicorn's HTTP protocol. All code that depends on uvicorn's internals is here.

Uvicorn waits for a request's headers without a time limit, keeps any number of them in memory,
closes a connection while the client still sends, and writes each chunk of a stream through every
ASGI layer. This module limits the former two, closes gently, and offers a shortcut for the latter.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from rekindle.errors import BadRequest, ServerError
from rekindle.http.logs import REQUEST_ID_HEADER, fresh_id
from rekindle.http.records import Observer, RequestRecord, recorded

BODY_WRITER = "rekindle.body_writer"  # the writer's key in the request's scope
MAX_HEADER_BYTES = 64 << 10
HEADERS_TIMEOUT_S = 30.0
# How much more a client may send after an early response that closes the connection.
MAX_DISCARDED_BYTES = 256 << 20
MAX_DISCARDING_S = 30.0
MAX_SILENCE_S = 2.0


class HeadersTooLarge(BadRequest):
    status, code = 431, "headers_too_large"

    def __init__(self) -> None:
        super().__init__(f"Headers may have at most {MAX_HEADER_BYTES} bytes together.")


class HeadersTooSlow(BadRequest):
    status, code = 408, "headers_too_slow"


class InvalidHttp(BadRequest):
    code = "invalid_http"


class CycleTransport:
    """The transport of one request. If the client still sends the body, `close` is delayed."""

    def __init__(self, cycle: RequestResponseCycle, discard: Callable[[], None]) -> None:
        transport = cycle.transport
        self._transport = transport
        self._cycle = weakref.ref(cycle)  # weak, because the cycle holds this transport
        self._discard = discard
        self.write = transport.write  # not a method here, because every token is written by it
        self.is_closing = transport.is_closing

    def close(self) -> None:
        cycle = self._cycle()
        if cycle is not None and cycle.response_complete and cycle.more_body:
            self._discard()
        else:
            self._transport.close()


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
        # The application's observers also get the requests that never reach it.
        self._observers: Sequence[Observer] = getattr(self.config.app, "observers", ())
        self._deadline: asyncio.TimerHandle | None = None
        self._in_headers = False
        self._header_bytes = 0
        self._discarded_bytes: int | None = None  # None until the rest of a request is discarded

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._discarded_bytes is not None:
            self._unset_keepalive_if_required()
            self._discarded_bytes += len(data)
            if self._discarded_bytes > MAX_DISCARDED_BYTES:
                self.transport.close()
            return
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
            self.cycle.transport = CycleTransport(self.cycle, self._discard_rest)  # type: ignore[assignment]

    def _start_timer(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(HEADERS_TIMEOUT_S, self._time_out)

    def _stop_timer(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _time_out(self) -> None:
        if self._in_headers:
            seconds = f"{HEADERS_TIMEOUT_S:g} seconds"
            self._refuse(HeadersTooSlow(f"The request's headers did not arrive within {seconds}."))
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        self._refuse(InvalidHttp(msg))

    def _discard_rest(self) -> None:
        """End the response, and close the connection when the client has sent its request.

        Closing it at once would reset the connection, because there are unread bytes. A client that
        sends before it reads would see the reset and never the response.
        """
        if self.transport.is_closing():
            return
        self._discarded_bytes = 0
        self._stop_timer()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._await_silence(self.loop.time() + MAX_DISCARDING_S)

    def _await_silence(self, until_s: float) -> None:
        self._deadline = self.loop.call_later(
            MAX_SILENCE_S, self._check_silence, self._discarded_bytes, until_s
        )

    def _check_silence(self, before_bytes: int | None, until_s: float) -> None:
        """Close the connection if the client sent nothing since the last check, or takes long."""
        if self._discarded_bytes == before_bytes or self.loop.time() > until_s:
            self.transport.close()
        else:
            self._await_silence(until_s)

    def _refuse(self, error: ServerError) -> None:
        """Answer without the application, which has no request yet."""
        if self.transport.is_closing() or self._discarded_bytes is not None:
            return
        cycle = self.cycle
        if cycle is not None and cycle.response_started and not cycle.response_complete:
            self.transport.close()  # an error in the middle of a response could not be read
            return
        request_id = fresh_id()
        if cycle is None or cycle.response_complete:  # the application records its own requests
            record = RequestRecord(request_id, "-", "-", status=error.status, error=error.code)
            with recorded(record, self._observers):
                pass
        body = orjson.dumps(error.body())
        status = HTTPStatus(error.status)
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\n"
            "content-type: application/json\r\n"
            f"content-length: {len(body)}\r\n"
            f"{REQUEST_ID_HEADER}: {request_id}\r\n"
            "connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self._discard_rest()
