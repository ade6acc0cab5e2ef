"""The edge: what is refused before a route sees it."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rekindle.api.auth import LOOPBACK, Keys
from rekindle.api.json import JsonResponse
from rekindle.errors import BadRequest, ServerError

MOST_BODY_BYTES = 64 << 20
OPEN_PATHS = {"/health"}


class BodyTooLarge(BadRequest):
    status, code = 413, "body_too_large"


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
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
        except ServerError as error:
            await JsonResponse(error.body(), status_code=error.status)(scope, receive, send)
            return
        await self._app(scope, _bounded(receive), send)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if self._hosts is not None and _hostname(headers.get("host", "")) not in self._hosts:
            raise WrongHost("This server listens on this machine alone; ask for localhost.")
        scope["rekindle.salt"] = b""
        if scope["path"] not in OPEN_PATHS:
            scope["rekindle.salt"] = self._keys.salt(headers.get("authorization"))
        if scope["method"] == "POST":
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise WrongContentType(
                    "Send JSON with the header `Content-Type: application/json`."
                )
            length = headers.get("content-length", "0")
            if length.isdecimal() and int(length) > MOST_BODY_BYTES:
                raise _too_large()


def _bounded(receive: Receive) -> Receive:
    """A body without a declared length is counted as it comes."""
    seen = 0

    async def counted() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > MOST_BODY_BYTES:
            raise _too_large()
        return message

    return counted


def _too_large() -> BodyTooLarge:
    return BodyTooLarge(f"A request may have at most {MOST_BODY_BYTES} bytes.")


def _hostname(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()
