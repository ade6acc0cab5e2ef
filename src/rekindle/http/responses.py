"""Builds responses: JSON, errors in the shape of each dialect, and server-sent events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rekindle.errors import ServerError, Unavailable
from rekindle.http.protocol import BODY_WRITER, BodyWriter
from rekindle.http.records import CLIENT_GONE, note_error

log = logging.getLogger("rekindle.api")

T = TypeVar("T")

# Longest silence of a stream. Proxies and clients cut off connections without traffic, some after
# five seconds, and a long prefill takes minutes.
KEEP_ALIVE_S = 3.0
ERROR_HEADERS = {401: {"www-authenticate": "Bearer"}, 408: {"connection": "close"}}
SSE_DONE = b"data: [DONE]\n\n"
ERROR_FORMAT = "rekindle.error_format"  # key in the request's scope of what chooses the format

#: Descriptions of error statuses, for the OpenAPI document.
ERRORS = {
    400: "The request is invalid. The message names the field and the values it accepts",
    401: "The API key is missing or wrong",
    403: "The operation needs an admin key, or the page's origin is not allowed",
    404: "The path, model, session or cache key does not exist",
    408: "The body did not arrive in time",
    409: "Another request changed the same state in the meantime",
    413: "The body is too large",
    415: "The body is not JSON",
    421: "The Host header is not allowed",
    429: "Too many requests are in flight. Try again later",
    431: "The headers are too large",
    500: "An unexpected error. The log shows it under the response's x-request-id",
    503: "The model is loading, restarting or overloaded. Try again later",
    507: "The pinned state does not fit into the cache",
}

#: The response of a route that can stream, in the form that FastAPI takes.
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


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


class ErrorDetails(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None
    n_prompt_tokens: int | None = None  # of a prompt that is too long
    n_ctx: int | None = None


class ErrorBody(BaseModel):
    """The body of every error, for the OpenAPI document."""

    error: ErrorDetails


def documented(
    *statuses: int, model: type[BaseModel] = ErrorBody
) -> dict[int | str, dict[str, Any]]:
    """Describe the errors of a route to FastAPI. `model` is the shape of their bodies."""
    return {status: {"model": model, "description": ERRORS[status]} for status in statuses}


def sse_data(payload: Mapping[str, Any]) -> bytes:
    return b"data: " + _one_line(payload) + b"\n\n"


def sse_event(event: str, payload: Mapping[str, Any]) -> bytes:
    return b"event: " + event.encode() + b"\n" + sse_data(payload)


def sse_comment(text: str) -> bytes:
    """Return a comment line, which every client ignores."""
    return b": " + text.encode() + b"\n\n"


def _one_line(value: object) -> bytes:
    """Serialise as JSON, and escape characters that some clients treat as line ends."""
    data = orjson.dumps(value)
    if not data.isascii():
        for character in "\x85\u2028\u2029":
            data = data.replace(character.encode(), b"\\u%04x" % ord(character))
    return data


class EventTemplate:
    """An event in which only one text changes. The rest is serialised once."""

    def __init__(self, event: Callable[[str], bytes]) -> None:
        placeholder = "\0"
        self._before, self._after = event(placeholder).split(orjson.dumps(placeholder))

    def event(self, text: str) -> bytes:
        return b"%b%b%b" % (self._before, _one_line(text), self._after)


@dataclass(frozen=True, slots=True)
class ErrorFormat:
    """How a dialect writes an error, as a response body and as the last event of a stream."""

    body: Callable[[ServerError], Mapping[str, Any]]
    event: Callable[[ServerError], bytes]


OPENAI_ERRORS = ErrorFormat(
    body=lambda error: error.body(), event=lambda error: sse_data(error.body()) + SSE_DONE
)


def error_format(scope: Scope) -> ErrorFormat:
    """Return the error format of the request's dialect. It is chosen when an error occurs."""
    choose: Callable[[], ErrorFormat] | None = scope.get(ERROR_FORMAT)
    return choose() if choose else OPENAI_ERRORS


class ErrorResponse(JsonResponse):
    def __init__(self, error: ServerError, scope: Scope) -> None:
        note_error(scope, error.code)
        super().__init__(
            error_format(scope).body(error),
            status_code=error.status,
            headers=_error_headers(error),
        )


def _error_headers(error: ServerError) -> dict[str, str] | None:
    if error.status in (429, 503):
        return {"retry-after": str(error.retry_after_s or 1)}
    return ERROR_HEADERS.get(error.status)


@dataclass(frozen=True, slots=True)
class SignOfLife:
    """An event that a stream sends when it has sent nothing else for `after_s` seconds."""

    after_s: float
    event: Callable[[], bytes]


class EventStream(Response):
    """Streams chunks until they end or the client disconnects. `close` runs in both cases."""

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        close: Callable[[], None],
        headers: Mapping[str, str] | None = None,
        error_event: Callable[[ServerError], bytes] | None = None,
        sign_of_life: SignOfLife | None = None,
    ) -> None:
        """`error_event` replaces the dialect's, if the event depends on the previous chunks."""
        own = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(headers={**own, **(headers or {})})
        del self.headers["content-length"]
        self._chunks = chunks
        self._close = close
        self._error_event = error_event
        self._sign_of_life = sign_of_life
        self._body_writer: BodyWriter | None = None
        self._silent_since_s: float | None = None  # None while a chunk is being sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        def error_event(error: ServerError) -> bytes:
            note_error(scope, error.code)
            return (self._error_event or error_format(scope).event)(error)

        self._body_writer = scope.get(BODY_WRITER)
        sending = asyncio.create_task(self._send(send, error_event))
        disconnect = asyncio.create_task(disconnected(receive))
        living = asyncio.create_task(self._send_signs_of_life(send))
        try:
            await asyncio.wait({sending, disconnect}, return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                note_error(scope, CLIENT_GONE)
        except asyncio.CancelledError:  # the server stops, and the time for draining is over
            await _cancel(sending, living)
            stopping = Unavailable("the server is stopping; send the request again")
            await _send_last(send, error_event(stopping))
        finally:
            await _cancel(sending, living, disconnect)
            await self._chunks.aclose()
            self._close()  # not inside the generator, which may never have started

    def continue_as(self, other: EventStream) -> AsyncGenerator[bytes, None]:
        """Send the errors and signs of life of another stream from now on, and close it at the end.
        Returns its chunks. The other stream is not sent itself."""
        self._close, self._error_event = other._close, other._error_event
        self._sign_of_life = other._sign_of_life or self._sign_of_life
        return other._chunks

    @property
    def is_writable(self) -> bool:
        """Whether `write` may be called, while the generator waits for its next chunk."""
        is_idle = self._silent_since_s is not None
        return is_idle and self._body_writer is not None and self._body_writer.is_ready

    def write(self, chunk: bytes) -> None:
        """Send a chunk as if the generator had yielded it, without waking the generator's task."""
        assert self._body_writer is not None
        self._body_writer.write(chunk)
        self._silent_since_s = asyncio.get_running_loop().time()

    async def _send(self, send: Send, error_event: Callable[[ServerError], bytes]) -> None:
        headers = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **headers})
        time_s = asyncio.get_running_loop().time
        self._silent_since_s = time_s()
        last = b""
        try:
            async for chunk in self._chunks:
                self._silent_since_s = None
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                self._silent_since_s = time_s()
        except ServerError as error:  # the status has been sent, so the error is an event
            last = error_event(error)
        except Exception:
            log.exception("unexpected error in a stream")
            last = error_event(ServerError("an unexpected error ended this stream"))
        self._silent_since_s = None
        await _send_last(send, last)

    async def _send_signs_of_life(self, send: Send) -> None:
        """Not part of `_send`, because a deadline for each chunk would cost more than the chunk."""
        if self._sign_of_life is None:
            return
        time_s, wait_s = asyncio.get_running_loop().time, self._sign_of_life.after_s
        while True:
            await asyncio.sleep(wait_s)
            sign = self._sign_of_life
            since_s = self._silent_since_s
            wait_s = sign.after_s if since_s is None else since_s + sign.after_s - time_s()
            if wait_s <= 0:
                self._silent_since_s = None  # so that no chunk is written in front of the event
                body = sign.event()
                await send({"type": "http.response.body", "body": body, "more_body": True})
                self._silent_since_s, wait_s = time_s(), sign.after_s


async def _send_last(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _cancel(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def disconnected(receive: Receive) -> None:
    """Return once the client has disconnected."""
    while (await receive()).get("type") != "http.disconnect":
        pass


class ClientGone(Exception):
    """The client disconnected before the answer began."""


async def while_connected(request: Request, answer: Coroutine[Any, Any, T]) -> T:
    """Await the answer; cancel it as soon as the client disconnects."""
    work = asyncio.create_task(answer)
    disconnect = asyncio.create_task(disconnected(request.receive))
    try:
        await asyncio.wait({work, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientGone
        return work.result()
    except asyncio.CancelledError:
        raise Unavailable("the server is stopping; send the request again") from None
    finally:
        disconnect.cancel()
        work.cancel()
        await asyncio.gather(work, disconnect, return_exceptions=True)
