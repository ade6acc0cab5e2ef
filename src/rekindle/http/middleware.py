"""Checks every request before its route runs, and refuses new ones while the server drains."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rekindle.errors import BadRequest, Forbidden, ServerError, Unauthorized, Unavailable
from rekindle.http.auth import CALLER, LOOPBACK, OPEN_SALT, Caller, Keys
from rekindle.http.body import BODY, HeldBytes, LimitedBody, check_announced_size, upload
from rekindle.http.limits import Accounts, account_context
from rekindle.http.logs import REQUEST_ID_HEADER, request_context
from rekindle.http.protocol import MAX_HEADER_BYTES, HeadersTooLarge
from rekindle.http.records import RECORD, Observer, RequestRecord, endpoint_of, note_error, recorded
from rekindle.http.responses import ERROR_FORMAT, OPENAI_ERRORS, ErrorFormat, ErrorResponse


class Stopping(Unavailable):
    """Every new request gets this error while the server drains, even /health.

    A load balancer then stops sending requests, and a client knows that it may retry elsewhere.
    """


class Drain:
    """The time that requests in flight have to finish, once the server is told to stop."""

    def __init__(self, timeout_s: float = 30.0) -> None:
        self.timeout_s = timeout_s
        self.deadline_s: float | None = None  # None until draining begins

    def begin(self) -> None:
        self.deadline_s = time.monotonic() + self.timeout_s

    def end(self) -> None:
        """Give the requests in flight no more time."""
        self.deadline_s = time.monotonic()

    @property
    def is_over(self) -> bool:
        return self.deadline_s is not None and time.monotonic() >= self.deadline_s

    def check(self) -> None:
        """Raise Stopping if draining has begun."""
        if self.deadline_s is not None:
            raise Stopping("the server is stopping; send the request again")


# Anthropic's clients read the second one.
REQUEST_ID_HEADERS = (REQUEST_ID_HEADER, "request-id")
#: Headers that scripts of web pages may read.
EXPOSED_HEADERS = ", ".join(
    (
        *("x-request-id", "request-id", "retry-after"),
        *(
            f"x-ratelimit-{part}-{what}"
            for what in ("requests", "tokens")
            for part in ("limit", "remaining", "reset")
        ),
    )
)
APPLICATION = "rekindle.application"  # key in a WebSocket's scope of this application
DRAIN_CHECK_S = 0.5
SERVICE_RESTART, POLICY_VIOLATION = 1012, 1008  # codes with which a WebSocket ends
RECEIVED = "rekindle.received_s"  # the time's key in the request's scope
OPEN_PATHS = {"/health", "/health/ready"}  # need no API key
CONSOLE_FILES = "/console/"  # paths of the page at /, which holds no data
PUBLIC_PAGE = "/"  # shows less without a key
UPLOADS = {"/v1/cache/import"}  # take a file of any size
FILE_TYPE = "application/octet-stream"  # a page of another origin needs permission to send it
OLLAMA_PREFIX = "/api/"  # Ollama's documentation calls it with `curl -d`, without a content type
#: The content types that curl, LiteLLM and aiohttp send by default.
DEFAULT_TYPES = ("application/x-www-form-urlencoded", "", "application/octet-stream")


class WrongContentType(BadRequest):
    status, code = 415, "unsupported_media_type"


class WrongHost(BadRequest):
    status, code = 421, "wrong_host"


class OriginNotAllowed(Forbidden):
    code = "origin_not_allowed"


def received_s(request: Request) -> float:
    """When the request's headers had arrived, on the monotonic clock."""
    at_s: float = request.scope[RECEIVED]
    return at_s


class RequestMiddleware:
    """Pure ASGI, so that streams pass without buffering.

    `names` are those of the server besides loopback names, for a proxy on the same machine.
    `versioned` holds the first words of paths that are served under /v1 and also without it.
    `error_format` chooses the dialect of errors by path and headers.
    `observers` get the record of every request.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        host: str,
        *,
        drain: Drain | None = None,
        names: Iterable[str] = (),
        origins: Iterable[str] = (),
        versioned: Container[str] = (),
        error_format: Callable[[str, Headers], ErrorFormat] = lambda _path, _headers: OPENAI_ERRORS,
        observers: Sequence[Observer] = (),
        accounts: Accounts | None = None,
    ) -> None:
        self._app = app
        self.observers = observers
        self._keys = keys
        self._is_local = host in LOOPBACK
        self.allow(names, origins)
        self._drain = drain or Drain()
        self._versioned = versioned
        self._error_format = error_format
        self._accounts = accounts or Accounts()
        self.held = HeldBytes()

    def allow(self, names: Iterable[str], origins: Iterable[str]) -> None:
        """Replace the names of the server, and the origins whose pages may call it."""
        self._names = LOOPBACK | set(names)
        self._cors = Cors(origins, self._names if self._is_local else ())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http":
                headers = Headers(scope=scope)
                with (
                    request_context(headers.get(REQUEST_ID_HEADER)) as request_id,
                    self._recorded(scope, scope["method"], headers, request_id) as record,
                ):
                    added = self._cors.headers(headers.get("origin"))
                    added |= dict.fromkeys(REQUEST_ID_HEADERS, request_id)
                    with_headers = _with_headers(_noting_status(send, record), lambda: added)
                    await self._http(scope, headers, receive, with_headers)
            case "lifespan":
                await self._app(scope, receive, send)
            case "websocket":
                headers = Headers(scope=scope)
                with (
                    request_context(headers.get(REQUEST_ID_HEADER)) as request_id,
                    self._recorded(scope, "GET", headers, request_id) as record,
                ):
                    await self._websocket(scope, headers, receive, _noting_status(send, record))

    def _recorded(
        self, scope: Scope, method: str, headers: Headers, request_id: str
    ) -> AbstractContextManager[RequestRecord]:
        record = RequestRecord(request_id, method, endpoint_of(scope), headers=headers)
        scope[RECORD] = record
        return recorded(record, self.observers)

    async def _websocket(
        self, scope: Scope, headers: Headers, receive: Receive, send: Send
    ) -> None:
        """Check a WebSocket like a request. Its route sends requests to this application."""
        path = self._with_version(scope["path"])
        scope[ERROR_FORMAT] = partial(self._error_format, path, headers)
        try:
            self._check_headers(scope, headers)
            self._cors.check(headers.get("origin"))  # browsers send no preflight for a WebSocket
            scope[RECORD].tenant = self._identify(scope, headers).name
            self._drain.check()
        except ServerError as error:
            note_error(scope, error.code)
            if "websocket.http.response" in scope.get("extensions", {}):
                await ErrorResponse(error, scope)(scope, receive, send)
            else:
                await send({"type": "websocket.close", "code": POLICY_VIOLATION})
            return
        inner = {**scope, "path": path, APPLICATION: self}
        await self._app(inner, self._until_draining(receive), send)

    def _until_draining(self, receive: Receive) -> Receive:
        """Tell an open WebSocket that the server drains. It ends when its responses have."""
        pending: asyncio.Task[Message] | None = None

        async def receive_or_end() -> Message:
            nonlocal pending
            while self._drain.deadline_s is None:
                pending = pending or asyncio.ensure_future(_received(receive))
                done, _ = await asyncio.wait({pending}, timeout=DRAIN_CHECK_S)
                if done:
                    message, pending = pending.result(), None
                    return message
            if pending is not None:
                pending.cancel()
            return {"type": "websocket.disconnect", "code": SERVICE_RESTART}

        return receive_or_end

    async def _http(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        path = self._with_version(scope["path"])
        scope[RECEIVED] = time.monotonic()
        scope[ERROR_FORMAT] = partial(self._error_format, path, headers)
        try:
            self._check_headers(scope, headers)
            is_preflight = "origin" in headers and "access-control-request-method" in headers
            if scope["method"] == "OPTIONS" and is_preflight:
                await self._cors.preflight(headers)(scope, receive, send)
                return
            caller = self._identify(scope, headers)
            scope[RECORD].tenant = caller.name
            account = self._accounts.of(caller.salt, caller.name, caller.limits)
            send = _with_headers(send, account.headers)
            if scope["method"] == "POST" and not self._is_unserved(path):
                _check_content(headers, path)
            self._drain.check()
            if scope["method"] == "POST":
                account.count_request()
        except ServerError as error:
            response = ErrorResponse(error, scope)
            if isinstance(error, Stopping):
                response.headers["connection"] = "close"
            await response(scope, receive, send)
            return
        inner = {**scope, "path": path, CALLER: caller}
        if scope["method"] == "HEAD":  # uvicorn omits the body
            inner["method"] = "GET"
        try:
            with account_context(account):
                await self._unless_stopped(inner, receive, send)
        finally:
            record = scope[RECORD]
            record.endpoint, record.is_routed = endpoint_of(inner), "route" in inner

    async def _unless_stopped(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or refuse the request if the server stops before its response has begun. Streams
        end with an error event of their own."""
        has_begun = False

        async def send_and_note(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._answer(scope, receive, send_and_note)
        except asyncio.CancelledError:
            if not self._drain.is_over:
                raise
            if not has_begun:
                stopping = Stopping("the server is stopping; send the request again")
                await ErrorResponse(stopping, scope)(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the route, which reads the request's body within limits."""
        if scope["method"] == "POST" and scope["path"] in UPLOADS:
            await self._app(scope, upload(receive), send)
            return
        with contextlib.closing(LimitedBody(receive, self.held, scope[CALLER].salt)) as body:
            scope[BODY] = body
            await self._app(scope, body.receive, send)

    def _check_headers(self, scope: Scope, headers: Headers) -> None:
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADER_BYTES:
            raise HeadersTooLarge
        # DNS rebinding: a web page can resolve its own name to our loopback address. Its requests
        # then have that name as their Host.
        host = _hostname(headers.get("host", ""))
        if self._is_local and host not in self._names:
            raise WrongHost(
                f'Host "{host[:128]}" is not allowed. Use localhost, or start the server with '
                "--allowed-host if a proxy forwards this name, or with --host and an API key to "
                "make the server reachable from other machines."
            )

    def _identify(self, scope: Scope, headers: Headers) -> Caller:
        if scope["path"] in OPEN_PATHS or scope["path"].startswith(CONSOLE_FILES):
            return Caller(OPEN_SALT, admin=False)
        if scope["path"] == PUBLIC_PAGE:
            with contextlib.suppress(Unauthorized):
                return self._keys.caller(headers.get("authorization"), headers.get("x-api-key"))
            return Caller(OPEN_SALT, admin=False)
        return self._keys.caller(headers.get("authorization"), headers.get("x-api-key"))

    def _is_unserved(self, path: str) -> bool:
        """Whether the router will answer 404, whatever the body is. OpenAI has such paths."""
        first, _, rest = path[1:].partition("/")
        return first == "v1" and rest.partition("/")[0] not in self._versioned

    def _with_version(self, path: str) -> str:
        """Add /v1 if it is missing, because clients differ in the base URL that they take."""
        return f"/v1{path}" if path[1:].partition("/")[0] in self._versioned else path


#: The statuses of a WebSocket's messages, as if each were the response to a request.
_WEBSOCKET_STATUSES = {"websocket.accept": 101, "websocket.close": 403}


def _noting_status(send: Send, record: RequestRecord) -> Send:
    async def noting_send(message: Message) -> None:
        if record.status == 0:
            record.status = message.get("status", _WEBSOCKET_STATUSES.get(message["type"], 0))
        await send(message)

    return noting_send


def _with_headers(send: Send, headers: Callable[[], Mapping[str, str]]) -> Send:
    """Add headers to a response. They are asked for when it begins."""

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            items = headers().items()
            added = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in items]
            message = {**message, "headers": [*message["headers"], *added]}
        await send(message)

    return send_with_headers


def _check_content(headers: Headers, path: str) -> None:
    """Check the content type and the announced size of a POST body.

    A web page cannot send JSON to another origin without permission, but it can send a form.
    """
    bodiless = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
    if bodiless and "content-type" not in headers and "origin" not in headers:
        return
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if path in UPLOADS:
        if kind != FILE_TYPE:
            raise WrongContentType(f"Send the file with the header `Content-Type: {FILE_TYPE}`.")
        return
    from_page = "origin" in headers or "sec-fetch-site" in headers  # browsers send these
    is_default = path.startswith(OLLAMA_PREFIX) and kind in DEFAULT_TYPES and not from_page
    if kind != "application/json" and not is_default:
        raise WrongContentType("Send JSON with the header `Content-Type: application/json`.")
    check_announced_size(headers.get("content-length", "0"))


def _hostname(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()


async def _received(receive: Receive) -> Message:
    return await receive()


class Cors:
    """Decides which web pages may call the server from a browser.

    Pages of the listed origins may, and pages of the server's own names if the server is local.
    """

    def __init__(self, origins: Iterable[str], own_names: Container[str]) -> None:
        self._origins = frozenset(origins)
        self._own_names = own_names

    def headers(self, origin: str | None) -> dict[str, str]:
        """Return the headers for a response to a page of this origin. None: not a page."""
        if origin is None:
            return {}
        allowed = {
            "access-control-allow-origin": origin,
            "access-control-expose-headers": EXPOSED_HEADERS,
        }
        return {"vary": "Origin", **(allowed if self._allows(origin) else {})}

    def check(self, origin: str | None) -> None:
        """Raise OriginNotAllowed for a page of another origin. None: not a page."""
        if origin is not None and not self._allows(origin):
            raise OriginNotAllowed(_refusal(origin))

    def preflight(self, headers: Headers) -> Response:
        """Answer a browser's question before it sends the request. It comes without a key."""
        if not self._allows(headers["origin"]):
            # Without the headers below, the browser refuses to send the request. Some tools take
            # any other status than 200 for a broken server.
            return PlainTextResponse(_refusal(headers["origin"]))
        allowed = {
            "access-control-allow-methods": "GET, POST, DELETE, OPTIONS",
            "access-control-max-age": "600",
        }
        names = headers.get("access-control-request-headers", "")
        if re.fullmatch(r"[\w!#$%&'*+.^`|~, -]{1,1024}", names, re.ASCII):
            allowed["access-control-allow-headers"] = names
        if headers.get("access-control-request-private-network") == "true":
            allowed["access-control-allow-private-network"] = "true"
        return Response(headers=allowed)

    def _allows(self, origin: str) -> bool:
        is_listed = not self._origins.isdisjoint(("*", origin))
        return is_listed or _has_name(origin, self._own_names)


def _refusal(origin: str) -> str:
    origin = origin[:128]
    return f'Origin "{origin}" is not allowed. Start the server with --cors-origin {origin}.'


def _has_name(origin: str, names: Container[str]) -> bool:
    try:
        parts = urlsplit(origin)
        hostname = parts.hostname
    except ValueError:
        return False
    exact = f"{parts.scheme}://{parts.netloc}" == origin and "@" not in origin
    return exact and parts.scheme in ("http", "https") and hostname in names
