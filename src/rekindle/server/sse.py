"""Server-sent events, and the end of a stream whose client has disconnected."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from rekindle.errors import ServerError, Unavailable

log = logging.getLogger("rekindle.api")

DONE = b"data: [DONE]\n\n"


def data(payload: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(payload) + b"\n\n"


def named(event: str, payload: Mapping[str, Any]) -> bytes:
    return b"event: " + event.encode() + b"\n" + data(payload)


def comment(text: str) -> bytes:
    """A line that every client ignores."""
    return b": " + text.encode() + b"\n\n"


class EventStream(Response):
    """Streams chunks until they end or the client disconnects; `close` runs either way."""

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[bytes, None], close: Callable[[], None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send(send))
        disconnect = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({sending, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:  # the server stops, and the time to drain is over
            await _cancel(sending)
            await _send_error(send, Unavailable("the server is stopping; send the request again"))
        finally:
            await _cancel(sending, disconnect)
            await self._chunks.aclose()
            self._close()  # not in the generator: it may never have been started

    async def _send(self, send: Send) -> None:
        headers = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **headers})
        try:
            async for chunk in self._chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except ServerError as error:
            await _send_error(send, error)
        except Exception:
            log.exception("unexpected error in a stream")
            await _send_error(send, ServerError("an unexpected error ended this stream"))
        else:
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_error(send: Send, error: ServerError) -> None:
    """Once bytes were sent, an error is an event that ends the stream."""
    body = data(error.body()) + DONE
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _cancel(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    message: Message = {}
    while message.get("type") != "http.disconnect":
        message = await receive()
