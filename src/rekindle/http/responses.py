"""Bodies of answers: JSON through orjson, errors in a dialect's shape, and server-sent events."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from rekindle.errors import ServerError, Unavailable

# ----------------------------------------------------------------------
# The body of a streamed answer, written without a task's turn of the event loop.

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


log = logging.getLogger("rekindle.api")

RETRY_SOON = {"retry-after": "1"}
ERROR_HEADERS = {
    401: {"www-authenticate": "Bearer"},
    408: {"connection": "close"},
    429: RETRY_SOON,
    503: RETRY_SOON,
}
SSE_DONE = b"data: [DONE]\n\n"
ERROR_FORMAT = "rekindle.error_format"  # in the scope
# Characters that end a line for clients that read text and not bytes, as JSON can write them.
LINE_ENDS = {each.encode(): b"\\u%04x" % ord(each) for each in "\x85\u2028\u2029"}

# What each status of an error means, for the OpenAPI document.
ERRORS = {
    400: "The request is wrong: the message names the field and what it takes",
    401: "The API key is missing or wrong",
    403: "This needs an admin's key, or a page of another origin",
    404: "There is no such path, model, session or cache key",
    408: "The body did not arrive in time",
    409: "What was asked for was undone by another request meanwhile",
    413: "The body is too large",
    415: "The body is not JSON",
    421: "The Host header names another server",
    429: "Too many requests are in flight: try again later",
    431: "The headers are too large",
    500: "An unexpected error; the log has it under the answer's x-request-id",
    503: "The model is loading, restarting or overloaded: try again later",
    507: "What is to be kept exceeds the room for it",
}


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


class ErrorDetails(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every error, for the OpenAPI page."""

    error: ErrorDetails


def documented(
    *statuses: int, model: type[BaseModel] = ErrorBody
) -> dict[int | str, dict[str, Any]]:
    """Errors that a route may answer with, as FastAPI takes them; `model`: in which shape."""
    return {status: {"model": model, "description": ERRORS[status]} for status in statuses}


# The answer of a route that streams when it is asked to, as FastAPI takes it.
MAY_STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The whole answer; with `stream: true` its chunks as server-sent events",
        "content": {
            "text/event-stream": {
                "schema": {
                    "type": "object",  # of each event
                    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
                }
            }
        },
    }
}


def sse_data(payload: Mapping[str, Any]) -> bytes:
    return b"data: " + _one_line(payload) + b"\n\n"


def _one_line(value: object) -> bytes:
    """JSON without a character that ends a line."""
    data = orjson.dumps(value)
    if not data.isascii():
        for character, escaped in LINE_ENDS.items():
            data = data.replace(character, escaped)
    return data


class EventTemplate:
    """An event of which one text alone changes: the rest of its JSON is written once."""

    def __init__(self, event: Callable[[str], bytes]) -> None:
        placeholder = "\0"
        self._before, self._after = event(placeholder).split(orjson.dumps(placeholder))

    def event(self, text: str) -> bytes:
        return b"%b%b%b" % (self._before, _one_line(text), self._after)


def sse_event(event: str, payload: Mapping[str, Any]) -> bytes:
    return b"event: " + event.encode() + b"\n" + sse_data(payload)


def sse_comment(text: str) -> bytes:
    """A line that every client ignores."""
    return b": " + text.encode() + b"\n\n"


@dataclass(frozen=True, slots=True)
class ErrorFormat:
    """How a dialect writes an error: as the body of an answer, and as the end of a stream."""

    body: Callable[[ServerError], Mapping[str, Any]]
    event: Callable[[ServerError], bytes]


OPENAI_ERRORS = ErrorFormat(
    body=lambda error: error.body(), event=lambda error: sse_data(error.body()) + SSE_DONE
)


def error_format(scope: Scope) -> ErrorFormat:
    """That of the dialect which the request is in."""
    found: ErrorFormat = scope.get(ERROR_FORMAT, OPENAI_ERRORS)
    return found


class ErrorResponse(JsonResponse):
    def __init__(self, error: ServerError, scope: Scope) -> None:
        super().__init__(
            error_format(scope).body(error),
            status_code=error.status,
            headers=ERROR_HEADERS.get(error.status),
        )


@dataclass(frozen=True, slots=True)
class SignOfLife:
    """What a stream sends when it has nothing to say for so long."""

    after_s: float
    event: Callable[[], bytes]


class EventStream(Response):
    """Streams chunks until they end or the client disconnects; `close` runs either way."""

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        close: Callable[[], None],
        headers: Mapping[str, str] | None = None,
        error_event: Callable[[ServerError], bytes] | None = None,
        sign_of_life: SignOfLife | None = None,
    ) -> None:
        """`error_event`: how an error ends it, where that depends on what was sent before."""
        own = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(headers={**own, **(headers or {})})
        del self.headers["content-length"]
        self._chunks = chunks
        self._close = close
        self._error_event = error_event
        self._sign_of_life = sign_of_life
        self._body_writer: BodyWriter | None = None
        self._silent_since_s: float | None = None  # None: something is being sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error_event = self._error_event or error_format(scope).event
        self._body_writer = scope.get(BODY_WRITER)
        sending = asyncio.create_task(self._send(send, error_event))
        disconnect = asyncio.create_task(disconnected(receive))
        living = asyncio.create_task(self._live(send))
        try:
            await asyncio.wait({sending, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:  # the server stops, and the time to drain is over
            await _cancel(sending, living)
            stopping = Unavailable("the server is stopping; send the request again")
            await _send_last(send, error_event(stopping))
        finally:
            await _cancel(sending, living, disconnect)
            await self._chunks.aclose()
            self._close()  # not in the generator: it may never have been started

    @property
    def is_writable(self) -> bool:
        """Whether `write` can be called: while the generator waits for what it is to yield."""
        return self._body_writer is not None and self._body_writer.is_ready

    def write(self, chunk: bytes) -> None:
        """Send a chunk as if it had been yielded, without waking the task that waits for one."""
        assert self._body_writer is not None
        self._body_writer.write(chunk)
        self._silent_since_s = asyncio.get_running_loop().time()

    async def _send(self, send: Send, error_event: Callable[[ServerError], bytes]) -> None:
        headers = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **headers})
        time_s = asyncio.get_running_loop().time
        self._silent_since_s = time_s()
        try:
            async for chunk in self._chunks:
                self._silent_since_s = None
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                self._silent_since_s = time_s()
            self._silent_since_s = None
        except ServerError as error:
            self._silent_since_s = None
            await _send_last(send, error_event(error))
        except Exception:
            self._silent_since_s = None
            log.exception("unexpected error in a stream")
            failure = ServerError("an unexpected error ended this stream")
            await _send_last(send, error_event(failure))
        else:
            await _send_last(send, b"")

    async def _live(self, send: Send) -> None:
        """Give signs of life. Not in `_send`: a deadline for each chunk would cost more than it."""
        sign = self._sign_of_life
        if sign is None:
            return
        time_s, waits_s = asyncio.get_running_loop().time, sign.after_s
        while True:
            await asyncio.sleep(waits_s)
            since_s = self._silent_since_s
            waits_s = sign.after_s if since_s is None else since_s + sign.after_s - time_s()
            if waits_s <= 0:
                self._silent_since_s, waits_s = time_s(), sign.after_s
                body = sign.event()
                await send({"type": "http.response.body", "body": body, "more_body": True})


async def _send_last(send: Send, body: bytes) -> None:
    """Once bytes were sent, an error is an event that ends the stream."""
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _cancel(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def disconnected(receive: Receive) -> None:
    """Return once the client has disconnected."""
    while (await receive()).get("type") != "http.disconnect":
        pass
