"""Serves the Responses API over a WebSocket.

A message `response.create` becomes a streamed POST to /v1/responses inside the server. Keys, limits
and errors are therefore those of any request. Each event of the stream becomes a message.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.types import ASGIApp, Message, Scope
from starlette.websockets import WebSocket, WebSocketDisconnect

from rekindle.api.base.documents import Stored
from rekindle.api.responses.stored import LANE, Lane
from rekindle.errors import BadRequest, ServerError
from rekindle.http.body import LARGE_BODY_BYTES, LIMITS, check_message
from rekindle.http.middleware import APPLICATION, SERVICE_RESTART

log = logging.getLogger("rekindle.api")

PATH = "/v1/responses"
MAX_LANES = 16  # conversations that one connection carries concurrently
MAX_WAITING = 16  # messages of a lane that wait for the one before them
MAX_AGE_S = 3600.0  # of a connection
NOT_FORWARDED = ("connection", "upgrade", "content-length", "content-type", "x-request-id")
NOT_SENT = ("type", "stream", "stream_options", "stream_id")  # fields of a message, not of a body


class TooManyLanes(BadRequest):
    code = "websocket_stream_limit_reached"

    def __init__(self) -> None:
        super().__init__(
            f"A connection may have {MAX_LANES} different values of `stream_id`: open another one.",
            param="stream_id",
        )


class ConnectionTooOld(BadRequest):
    code = "websocket_connection_limit_reached"

    def __init__(self) -> None:
        super().__init__(
            f"A connection may be open for {MAX_AGE_S / 60:g} minutes: open another one."
        )


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A message that is not answered yet."""

    message: dict[str, Any]
    size_bytes: int


class Connection:
    """One WebSocket. Messages with the same `stream_id` are answered one after the other."""

    def __init__(self, websocket: WebSocket) -> None:
        self._websocket = websocket
        self._application: ASGIApp = websocket.scope[APPLICATION]
        self._unstored: dict[str, Stored] = {}
        self._lanes: dict[str | None, asyncio.Queue[_Waiting | None]] = {}
        self._held_bytes = 0  # of messages that are not answered yet
        self._answered = asyncio.Event()  # set after each answer
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_gone = asyncio.Event()  # the client

    async def serve(self) -> None:
        """Answer messages until the client disconnects, or the connection is too old."""
        await self._websocket.accept()
        try:
            async with asyncio.timeout(MAX_AGE_S):
                code = await self._read()
        except TimeoutError:
            await self._send_error(ConnectionTooOld(), None)
            code = None
        if code is None or code == SERVICE_RESTART:  # responses that have begun may finish
            await self._finish()
            with contextlib.suppress(RuntimeError, WebSocketDisconnect):
                await self._websocket.close(code or 1000)
        self._is_gone.set()
        for lane in self._lanes.values():
            while not lane.empty():
                lane.get_nowait()
        await self._finish()

    async def _read(self) -> int:
        """Read messages until the client closes the connection. Returns the close code."""
        while True:
            try:
                text = await self._websocket.receive_text()
            except WebSocketDisconnect as end:
                return end.code
            except KeyError:
                await self._send_error(BadRequest("Send JSON as text."), None)
                continue
            await self._accept(text)

    async def _accept(self, text: str) -> None:
        """Put a message into its lane. Waits while the messages before it take too much memory."""
        name = None
        try:
            content = text.encode()
            check_message(content)
            is_large = len(content) > LARGE_BODY_BYTES
            message = await asyncio.to_thread(_parsed, content) if is_large else _parsed(content)
            name = _name_of(message)
            if message["type"] == "response.steer":
                await self._refuse_steering(message)
                return
            if name not in self._lanes:
                self._open_lane(name)
        except ServerError as error:
            await self._send_error(error, name)
            return
        while self._held_bytes and self._held_bytes + len(content) > LIMITS.body_bytes:
            self._answered.clear()
            await self._answered.wait()
        self._held_bytes += len(content)
        await self._lanes[name].put(_Waiting(message, len(content)))

    def _open_lane(self, name: str | None) -> None:
        if len(self._lanes) >= MAX_LANES:
            raise TooManyLanes
        lane = self._lanes[name] = asyncio.Queue(MAX_WAITING)
        self._tasks.add(asyncio.create_task(self._answer_all(name, lane)))

    async def _finish(self) -> None:
        """Wait until every lane has answered its messages."""
        for lane in self._lanes.values():
            await lane.put(None)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _answer_all(self, name: str | None, messages: asyncio.Queue[_Waiting | None]) -> None:
        lane = Lane(self._unstored)
        while (waiting := await messages.get()) is not None:
            message = waiting.message
            exchange = _Exchange(self._websocket, name, self._is_gone)
            try:
                await self._application(
                    _scope(self._websocket.scope, lane), exchange.receive(message), exchange.send
                )
            except Exception:
                log.exception("unexpected error on a WebSocket")
                await self._send_error(ServerError("an unexpected error happened"), name)
            previous = message.get("previous_response_id")
            if exchange.has_failed and isinstance(previous, str):
                lane.forget(previous)  # so that the client sends the whole conversation
            self._held_bytes -= waiting.size_bytes
            self._answered.set()

    async def _refuse_steering(self, message: Mapping[str, Any]) -> None:
        error = {
            "code": "steering_not_supported",
            "message": "A response cannot be steered while it is computed: cancel it, and create "
            "another one.",
            "type": "invalid_request_error",
        }
        previous = str(message.get("previous_response_id"))
        steer = {"input": message.get("input"), "previous_response_id": previous}
        failed = {"type": "response.steer.failed", "sequence_number": 0, "steer": steer}
        await self._websocket.send_text(orjson.dumps({**failed, "error": error}).decode())

    async def _send_error(self, error: ServerError, name: str | None) -> None:
        told = {"type": "error", "status": error.status, "error": error.body()["error"]}
        with contextlib.suppress(RuntimeError, WebSocketDisconnect):
            await self._websocket.send_text(_with_lane(told, name))


class _Exchange:
    """One request inside the server, whose response becomes messages of the WebSocket."""

    def __init__(self, websocket: WebSocket, name: str | None, is_gone: asyncio.Event) -> None:
        self._websocket = websocket
        self._name = name  # of the lane
        self._is_gone = is_gone
        self._status = 0
        self._pending = b""  # the beginning of an event, or of an error
        self.has_failed = False

    def receive(self, message: Mapping[str, Any]) -> Any:
        """ASGI's `receive`: first the body of the request, then the client's disconnect."""
        body = {name: value for name, value in message.items() if name not in NOT_SENT}
        content: bytes | None = orjson.dumps({**body, "stream": True})

        async def receive() -> Message:
            nonlocal content
            if content is not None:
                sent, content = content, None
                return {"type": "http.request", "body": sent, "more_body": False}
            await self._is_gone.wait()
            return {"type": "http.disconnect"}

        return receive

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            return
        if self._is_gone.is_set():
            return
        self._pending += message.get("body", b"")
        if self._status == 200:
            await self._send_events()
        elif not message.get("more_body", False):
            self.has_failed = True
            error = orjson.loads(self._pending)["error"]
            event = {"type": "error", "status": self._status, "error": error}
            await self._tell(_with_lane(event, self._name))

    async def _tell(self, text: str) -> None:
        try:
            await self._websocket.send_text(text)
        except (WebSocketDisconnect, RuntimeError):
            self._is_gone.set()

    async def _send_events(self) -> None:
        *blocks, self._pending = self._pending.split(b"\n\n")
        for block in blocks:
            event, _, data = block.partition(b"\ndata: ")
            if not event.startswith(b"event: "):
                continue  # a comment
            self.has_failed |= event in (b"event: response.failed", b"event: error")
            text = data.decode() if self._name is None else _with_lane(data, self._name)
            await self._tell(text)


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        message = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"The message is not valid JSON: {error}.") from None
    kind = message.get("type") if isinstance(message, dict) else None
    if kind not in ("response.create", "response.steer"):
        raise BadRequest(
            "A message is an object with the `type` response.create, and the fields of a request.",
            param="type",
        )
    if message.get("background"):
        raise BadRequest(
            "Over a WebSocket no response is computed in the background: leave `background` out, "
            "or send the request with POST.",
            param="background",
        )
    return dict(message)


def _name_of(message: Mapping[str, Any]) -> str | None:
    name = message.get("stream_id")
    if name is not None and not (isinstance(name, str) and len(name) <= 256):
        raise BadRequest("`stream_id` takes a string of at most 256 characters.", param="stream_id")
    return name


def _with_lane(event: Mapping[str, Any] | bytes, name: str | None) -> str:
    fields = orjson.loads(event) if isinstance(event, bytes) else event
    return orjson.dumps(fields if name is None else {**fields, "stream_id": name}).decode()


def _scope(websocket: Scope, lane: Lane) -> Scope:
    """The scope of a request with the headers of the WebSocket."""
    kept = [
        (name, value)
        for name, value in websocket["headers"]
        if name.decode("latin-1") not in NOT_FORWARDED and not name.startswith(b"sec-websocket")
    ]
    return {
        "type": "http",
        "asgi": websocket["asgi"],
        "http_version": "1.1",
        "method": "POST",
        "scheme": {"wss": "https"}.get(websocket["scheme"], "http"),
        "path": PATH,
        "raw_path": PATH.encode(),
        "query_string": b"",
        "root_path": websocket.get("root_path", ""),
        "headers": [*kept, (b"content-type", b"application/json")],
        "client": websocket.get("client"),
        "server": websocket.get("server"),
        "state": dict(websocket["state"]),
        LANE: lane,
    }
