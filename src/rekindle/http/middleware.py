"""What is refused before a route runs: wrong host, key or content type, too large a request."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Container, Iterable, Mapping
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rekindle.errors import BadRequest, Forbidden, ServerError
from rekindle.http import body as request_body
from rekindle.http.auth import LOOPBACK, OPEN_SALT, Caller, Keys, set_caller
from rekindle.http.body import BODY, BodyTooLarge, HeldBytes, LimitedBody, Upload
from rekindle.http.logs import HEADER, answering
from rekindle.http.responses import ERROR_FORMAT, OPENAI_ERRORS, ErrorFormat, ErrorResponse

# ----------------------------------------------------------------------
# Which web pages may call this server from a browser, by their origin (CORS).

ANY = "*"
METHODS = "GET, HEAD, POST, DELETE, OPTIONS"
EXPOSED = "x-request-id, retry-after"  # to the page's script, beside what it always sees
MAX_AGE_S = 600

_NAMES = re.compile(r"[\w!#$%&'*+.^`|~, -]{1,1024}", re.ASCII)  # of headers


class OriginNotAllowed(Forbidden):
    code = "origin_not_allowed"

    def __init__(self) -> None:
        super().__init__("Pages of this origin may not call the server: see --cors-origin.")


class Cors:
    """Pages of these origins, and on a server of this machine those of this machine."""

    def __init__(self, origins: Iterable[str], *, loopback: bool) -> None:
        self._origins = frozenset(origins)
        self._loopback = loopback

    def headers(self, origin: str | None) -> dict[str, str]:
        """What every answer to a page of this origin says; nothing to a program."""
        if origin is None:
            return {}
        if not self._allows(origin):
            return {"vary": "Origin"}
        return {
            "vary": "Origin",
            "access-control-allow-origin": origin,
            "access-control-expose-headers": EXPOSED,
        }

    def preflight(self, headers: Headers) -> Response:
        """The answer to a browser that asks before it sends; it sends no key with that."""
        if not self._allows(headers["origin"]):
            raise OriginNotAllowed
        allowed = {
            "access-control-allow-methods": METHODS,
            "access-control-max-age": str(MAX_AGE_S),
        }
        names = headers.get("access-control-request-headers", "")
        if _NAMES.fullmatch(names):
            allowed["access-control-allow-headers"] = names
        if headers.get("access-control-request-private-network") == "true":
            allowed["access-control-allow-private-network"] = "true"
        return Response(status_code=204, headers=allowed)

    def _allows(self, origin: str) -> bool:
        if ANY in self._origins or origin in self._origins:
            return True
        return self._loopback and _is_of_this_machine(origin)


def is_preflight(method: str, headers: Headers) -> bool:
    asks = "origin" in headers and "access-control-request-method" in headers
    return method == "OPTIONS" and asks


def _is_of_this_machine(origin: str) -> bool:
    try:
        parts = urlsplit(origin)
        hostname = parts.hostname
    except ValueError:
        return False
    exact = f"{parts.scheme}://{parts.netloc}" == origin and "@" not in origin
    return exact and parts.scheme in ("http", "https") and hostname in LOOPBACK


RECEIVED = "rekindle.received_s"  # in the scope
MOST_HEADER_BYTES = 64 << 10
OPEN_PATHS = {"/health"}
UPLOADS = {"/v1/cache/import"}  # their body is a file of any size
FILE_TYPE = "application/octet-stream"  # which a page of another origin cannot send unasked
CURLED = "/api/"  # whose documentation, Ollama's, calls it with `curl -d` alone
#: What curl, LiteLLM and aiohttp send if nobody tells them what a body is.
UNNAMED = ("application/x-www-form-urlencoded", "", "application/octet-stream")
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
    """Checks host, origin, key, content type and sizes. Pure ASGI, so that streams pass unbuffered.

    `versioned` are first words of paths that are served under /v1 and may be asked for without;
    `error_format` tells by path and headers in which dialect errors are answered.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        host: str,
        *,
        origins: Iterable[str] = (),
        versioned: Container[str] = (),
        error_format: Callable[[str, Headers], ErrorFormat] = lambda _path, _headers: OPENAI_ERRORS,
    ) -> None:
        self._app = app
        self._keys = keys
        # DNS rebinding: a web page may resolve its own name to our loopback address, and its
        # requests then carry that name as their Host.
        self._hosts = LOOPBACK if host in LOOPBACK else None
        self._cors = Cors(origins, loopback=host in LOOPBACK)
        self._versioned = versioned
        self._error_format = error_format
        self.held = HeldBytes()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http":
                headers = Headers(scope=scope)
                with answering(headers.get(HEADER)) as request_id:
                    ours = {HEADER: request_id, **self._cors.headers(headers.get("origin"))}
                    await self._http(scope, headers, receive, _with_headers(send, ours))
            case "lifespan":
                await self._app(scope, receive, send)
            case _:  # nothing is served over websockets
                await send({"type": "websocket.close", "code": 1008})

    async def _http(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        path = self._with_version(scope["path"])
        scope[RECEIVED] = time.monotonic()
        scope[ERROR_FORMAT] = self._error_format(path, headers)
        try:
            self._check_address(scope, headers)
            if is_preflight(scope["method"], headers):
                await self._cors.preflight(headers)(scope, receive, send)
                return
            caller = self._check_caller(scope, headers)
        except ServerError as error:
            await ErrorResponse(error, scope)(scope, receive, send)
            return
        inner = {**scope, "path": path}
        if scope["method"] == "HEAD":  # the server below sends no body with it
            inner["method"] = "GET"
        if inner["method"] == "POST" and inner["path"] in UPLOADS:
            await self._app(inner, Upload(receive).receive, send)
            return
        with contextlib.closing(LimitedBody(receive, self.held, caller.salt)) as body:
            inner[BODY] = body
            await self._app(inner, body.receive, send)

    def _check_address(self, scope: Scope, headers: Headers) -> None:
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MOST_HEADER_BYTES:
            raise HeadersTooLarge(f"Headers may have at most {MOST_HEADER_BYTES} bytes together.")
        if self._hosts is not None and _hostname(headers.get("host", "")) not in self._hosts:
            raise WrongHost("This server listens on this machine alone; ask for localhost.")

    def _check_caller(self, scope: Scope, headers: Headers) -> Caller:
        caller = NOBODY
        if scope["path"] not in OPEN_PATHS:
            caller = self._keys.caller(headers.get("authorization"), headers.get("x-api-key"))
        set_caller(scope, caller)
        if scope["method"] == "POST":
            _check_content(headers, self._with_version(scope["path"]))
        return caller

    def _with_version(self, path: str) -> str:
        """Clients differ in whether the address they are given ends with /v1."""
        return f"/v1{path}" if path[1:].partition("/")[0] in self._versioned else path


def _with_headers(send: Send, headers: Mapping[str, str]) -> Send:
    """Adds these to the answer, whoever gives it."""
    added = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *added]}
        await send(message)

    return send_with_headers


def _check_content(headers: Headers, path: str) -> None:
    if _needs_no_content_type(headers):
        return
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if path in UPLOADS:
        if kind != FILE_TYPE:
            raise WrongContentType(f"Send the file with the header `Content-Type: {FILE_TYPE}`.")
        return
    if kind != "application/json" and not (path.startswith(CURLED) and _is_unnamed(kind, headers)):
        raise WrongContentType("Send JSON with the header `Content-Type: application/json`.")
    length = headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > request_body.MOST_BODY_BYTES:
        raise BodyTooLarge


def _is_unnamed(kind: str, headers: Headers) -> bool:
    """Whether this is what programs send of themselves, and not the form of a web page: browsers
    say where a request comes from."""
    from_page = "origin" in headers or "sec-fetch-site" in headers
    return kind in UNNAMED and not from_page


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
