"""Server-sent events, and the end of a stream nobody listens to any more."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from rekindle.errors import ServerError

DONE = b"data: [DONE]\n\n"


def data(payload: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(payload) + b"\n\n"


def named(event: str, payload: Mapping[str, Any]) -> bytes:
    return b"event: " + event.encode() + b"\n" + data(payload)


class EventStream(Response):
    """Streams chunks until they end or the client leaves; either way the chunks are closed."""

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncIterator[bytes]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send(send))
        leaving = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await sending

    async def _send(self, send: Send) -> None:
        try:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            async for chunk in _with_errors(self._chunks):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._chunks.aclose()  # type: ignore[attr-defined]


async def _with_errors(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Once bytes were sent, an error is an event, and then the end."""
    try:
        async for chunk in chunks:
            yield chunk
    except ServerError as error:
        yield data(error.body())
        yield DONE


async def _disconnected(receive: Receive) -> None:
    message: Message = {}
    while message.get("type") != "http.disconnect":
        message = await receive()
