"""HTTP as uvicorn speaks it, with limits to the time and the size of what comes before a request.

Uvicorn waits for ever for a request's headers, and keeps however many it is sent.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rekindle.errors import BadRequest, ServerError
from rekindle.http.logs import HEADER, fresh_id
from rekindle.http.middleware import MOST_HEADER_BYTES, HeadersTooLarge
from rekindle.http.responses import BODY_WRITER, BodyWriter

HEADERS_S = 30.0


class HeadersTooSlow(BadRequest):
    status, code = 408, "headers_too_slow"

    def __init__(self) -> None:
        super().__init__(f"The request's headers did not arrive within {HEADERS_S:g} seconds.")


class HttpProtocol(HttpToolsProtocol):
    """One connection. It is closed when it has begun, or goes on, without a request for too long;
    between requests it is uvicorn that closes it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deadline: asyncio.TimerHandle | None = None
        self._in_headers = False
        self._header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        # Also for the rest of a body that was refused, and for blank lines between requests.
        if self.cycle is None or self.cycle.response_complete:
            self._expect_request()
        super().data_received(data)
        if self._in_headers:
            self._header_bytes += len(data)
            if self._header_bytes > MOST_HEADER_BYTES:
                self._refuse(
                    HeadersTooLarge(f"Headers may have at most {MOST_HEADER_BYTES} bytes together.")
                )

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers = True
        self._header_bytes = 0

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._stop_waiting()
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:  # it is no upgrade
            self.scope[BODY_WRITER] = BodyWriter(self.cycle)  # type: ignore[literal-required]

    def _expect_request(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(HEADERS_S, self._give_up)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        if self._in_headers:
            self._refuse(HeadersTooSlow())
        else:
            self.transport.close()

    def _refuse(self, error: ServerError) -> None:
        """There is no request yet that the application could answer."""
        if self.transport.is_closing():
            return
        body = orjson.dumps(error.body())
        status = HTTPStatus(error.status)
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\n"
            "content-type: application/json\r\n"
            f"content-length: {len(body)}\r\n"
            f"{HEADER}: {fresh_id()}\r\n"
            "connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
