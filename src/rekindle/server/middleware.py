"""What is refused before a route runs: wrong host, key or content type, too large a request."""

from __future__ import annotations

import contextlib
import time

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from rekindle.errors import BadRequest, ServerError
from rekindle.server import request_body
from rekindle.server.auth import LOOPBACK, OPEN_SALT, Caller, Keys, set_caller
from rekindle.server.request_body import BodyTooLarge, HeldBytes, LimitedBody
from rekindle.server.responses import ErrorResponse

RECEIVED = "rekindle.received_s"  # in the scope
MOST_HEADER_BYTES = 64 << 10
OPEN_PATHS = {"/health"}
NOBODY = Caller(OPEN_SALT, admin=False)


class HeadersTooLarge(BadRequest):
    status, code = 431, "headers_too_large"


class WrongContentType(BadRequest):
    status, code = 415, "unsupported_media_type"


class WrongHost(BadRequest):
    status, code = 421, "wrong_host"


def received_s(request: Request) -> float:
    """When the request's headers were here, on the machine's monotonic clock."""
    at_s: float = request.scope[RECEIVED]
    return at_s


class RequestMiddleware:
    """Checks host, key, content type and sizes. Pure ASGI, so that streams pass unbuffered."""

    def __init__(self, app: ASGIApp, keys: Keys, host: str) -> None:
        self._app = app
        self._keys = keys
        self.held = HeldBytes()
        # DNS rebinding: a web page may resolve its own name to our loopback address, and its
        # requests then carry that name as their Host.
        self._hosts = LOOPBACK if host in LOOPBACK else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http":
                await self._http(scope, receive, send)
            case "lifespan":
                await self._app(scope, receive, send)
            case _:  # nothing is served over websockets
                await send({"type": "websocket.close", "code": 1008})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[RECEIVED] = time.monotonic()
        try:
            caller = self._check(scope)
        except ServerError as error:
            await ErrorResponse(error)(scope, receive, send)
            return
        with contextlib.closing(LimitedBody(receive, self.held, caller.salt)) as body:
            await self._app(scope, body.receive, send)

    def _check(self, scope: Scope) -> Caller:
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MOST_HEADER_BYTES:
            raise HeadersTooLarge(f"Headers may have at most {MOST_HEADER_BYTES} bytes together.")
        headers = Headers(scope=scope)
        if self._hosts is not None and _hostname(headers.get("host", "")) not in self._hosts:
            raise WrongHost("This server listens on this machine alone; ask for localhost.")
        caller = NOBODY
        if scope["path"] not in OPEN_PATHS:
            caller = self._keys.caller(headers.get("authorization"))
        set_caller(scope, caller)
        if scope["method"] == "POST":
            _check_content(headers)
        return caller


def _check_content(headers: Headers) -> None:
    if _needs_no_content_type(headers):
        return
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise WrongContentType("Send JSON with the header `Content-Type: application/json`.")
    length = headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > request_body.MOST_BODY_BYTES:
        raise BodyTooLarge


def _needs_no_content_type(headers: Headers) -> bool:
    """Whether this is a program's request without a body.

    A browser names the page's origin, and cannot send JSON to another origin without permission.
    """
    bodiless = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
    return bodiless and "content-type" not in headers and "origin" not in headers


def _hostname(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()
