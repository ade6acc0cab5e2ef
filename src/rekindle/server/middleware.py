"""The edge: what is refused before a route sees it."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from rekindle.errors import BadRequest, ServerError
from rekindle.server import request_body as body
from rekindle.server.auth import LOOPBACK, Caller, Keys
from rekindle.server.error_response import ErrorResponse
from rekindle.server.request_body import Body, BodyTooLarge

MOST_HEADER_BYTES = 64 << 10
OPEN_PATHS = {"/health"}
NOBODY = Caller(b"", admin=False)


class HeadersTooLarge(BadRequest):
    status, code = 431, "headers_too_large"


class WrongContentType(BadRequest):
    status, code = 415, "unsupported_media_type"


class WrongHost(BadRequest):
    status, code = 421, "wrong_host"


class Guard:
    """Host, key, content type and body size; pure ASGI, so that streams pass untouched."""

    def __init__(self, app: ASGIApp, keys: Keys, host: str) -> None:
        self._app = app
        self._keys = keys
        # A page elsewhere may resolve its own name to our loopback address: its Host gives it away.
        self._hosts = LOOPBACK if host in LOOPBACK else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http":
                await self._pass(scope, receive, send)
            case "lifespan":
                await self._app(scope, receive, send)
            case _:  # nothing is served over websockets
                await send({"type": "websocket.close", "code": 1008})

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check(scope)
        except ServerError as error:
            await ErrorResponse(error)(scope, receive, send)
        else:
            await self._app(scope, Body(receive).receive, send)

    def _check(self, scope: Scope) -> None:
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MOST_HEADER_BYTES:
            raise HeadersTooLarge(f"Headers may have at most {MOST_HEADER_BYTES} bytes together.")
        headers = Headers(scope=scope)
        if self._hosts is not None and _hostname(headers.get("host", "")) not in self._hosts:
            raise WrongHost("This server listens on this machine alone; ask for localhost.")
        caller = NOBODY
        if scope["path"] not in OPEN_PATHS:
            caller = self._keys.caller(headers.get("authorization"))
        scope["rekindle.salt"], scope["rekindle.cli.cache_client"] = caller.salt, caller.admin
        if scope["method"] == "POST":
            _check_content(headers)


def _check_content(headers: Headers) -> None:
    if _is_bare(headers):
        return
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise WrongContentType("Send JSON with the header `Content-Type: application/json`.")
    length = headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > body.MOST_BODY_BYTES:
        raise BodyTooLarge


def _is_bare(headers: Headers) -> bool:
    """A request without a body, as a program sends it; a page in a browser names its origin, and
    cannot ask for JSON without our leave."""
    bodiless = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
    return bodiless and "content-type" not in headers and "origin" not in headers


def _hostname(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()
