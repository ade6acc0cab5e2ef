"""The bytes of a request's body, bounded before anything is made of them."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

import orjson
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope

from rekindle.errors import BadRequest, TooManyRequests, Unavailable

MOST_BODY_BYTES = 64 << 20
BODY_S = 120.0  # for a whole body; a large one over a slow connection needs most of it
# A value takes one of these, and parsing takes time by the value: this many, 0.1 s.
PUNCTUATION = b",:[{"
MOST_PUNCTUATION = 500_000
MOST_HELD_BYTES = 512 << 20
MOST_HELD_BYTES_OF_ONE = MOST_HELD_BYTES // 2
BODY = "rekindle.body"  # in the scope


class BodyTooLarge(BadRequest):
    status, code = 413, "body_too_large"

    def __init__(self) -> None:
        super().__init__(f"A request may have at most {MOST_BODY_BYTES} bytes.")


class TooManyValues(BadRequest):
    code = "too_many_values"

    def __init__(self) -> None:
        super().__init__(
            f"The body has more than {MOST_PUNCTUATION} commas, colons and opening brackets: "
            "send fewer or shorter messages."
        )


class BodyTooSlow(BadRequest):
    status, code = 408, "body_too_slow"

    def __init__(self, limit_s: float = BODY_S) -> None:
        super().__init__(f"The request's body did not arrive within {limit_s:g} seconds.")


class HeldBytes:
    """The bytes of all bodies that are being read or answered, and of each caller's."""

    def __init__(self) -> None:
        self._by_caller: Counter[bytes] = Counter()
        self._all = 0

    def add(self, caller: bytes, size_bytes: int) -> None:
        """Count the bytes, or refuse them."""
        if self._by_caller[caller] + size_bytes > MOST_HELD_BYTES_OF_ONE:
            raise TooManyRequests(
                f"Your requests in flight have {MOST_HELD_BYTES_OF_ONE} bytes already; "
                "try again when some are answered."
            )
        if self._all + size_bytes > MOST_HELD_BYTES:
            raise Unavailable("The server holds as many requests as it can; try again later.")
        self._by_caller[caller] += size_bytes
        self._all += size_bytes

    def remove(self, caller: bytes, size_bytes: int) -> None:
        self._all -= size_bytes
        self._by_caller[caller] -= size_bytes
        if not self._by_caller[caller]:
            del self._by_caller[caller]

    @property
    def is_empty(self) -> bool:
        return not self._all and not self._by_caller


class LimitedBody:
    """Replaces `receive`: bounds the body in size and time, and passes on what follows it.

    What has arrived is counted in `held` until `close`.
    """

    def __init__(self, receive: Receive, held: HeldBytes, caller: bytes) -> None:
        self._receive = receive
        self._held = held
        self._caller = caller
        self._seen_bytes = 0
        self._made_bytes = 0
        self._punctuation = 0
        self._complete = False
        self._deadline: float | None = None

    def close(self) -> None:
        self._held.remove(self._caller, self._seen_bytes + self._made_bytes)
        self._seen_bytes = self._made_bytes = 0

    def hold(self, size_bytes: int) -> None:
        """Count what is kept because of this request beside its body, or refuse it."""
        self._held.add(self._caller, size_bytes)
        self._made_bytes += size_bytes

    async def receive(self) -> Message:
        if self._complete:
            return await self._receive()
        message = await self._receive_in_time()
        self._check(message.get("body", b""))
        self._complete = not message.get("more_body", False)
        return message

    def _check(self, part: bytes) -> None:
        if self._seen_bytes + len(part) > MOST_BODY_BYTES:
            raise BodyTooLarge
        self._held.add(self._caller, len(part))
        self._seen_bytes += len(part)
        self._punctuation += len(part) - len(part.translate(None, PUNCTUATION))
        if self._punctuation > MOST_PUNCTUATION:
            raise TooManyValues

    async def _receive_in_time(self) -> Message:
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().time() + BODY_S
        try:
            async with asyncio.timeout_at(self._deadline):
                return await self._receive()
        except TimeoutError:
            raise BodyTooSlow from None


class Upload:
    """Replaces `receive` where a body is a file, which its route writes down as it arrives: nothing
    is held of it, but a part that does not come ends it."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive

    async def receive(self) -> Message:
        try:
            async with asyncio.timeout(BODY_S):
                return await self._receive()
        except TimeoutError:
            raise BodyTooSlow from None


def body_of(request: Request) -> LimitedBody:
    """The body of a request that came through `RequestMiddleware`."""
    body: LimitedBody = request.scope[BODY]
    return body


# ----------------------------------------------------------------------
# Routes whose body is JSON: parsed by orjson and validated, beside the event loop if it is large.
#
# orjson refuses NaN and absurd nesting.

P = ParamSpec("P")
T = TypeVar("T")

LARGE_BODY_BYTES = 64 << 10  # up to here a millisecond is enough, and a thread not worth it
VALIDATORS = "validators"  # in the state of the application


def open_validators() -> ThreadPoolExecutor:
    """The threads for large bodies. Few: they compete with the event loop for the interpreter."""
    return ThreadPoolExecutor(2, VALIDATORS)


async def beside_loop(
    request: Request, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Work whose time grows with the request's body: in a thread if that is large."""
    size_bytes = len(await request.body())
    return await beside_loop_if_large(request, size_bytes, work, *args, **kwargs)


async def beside_loop_if_large(
    request: Request, size_bytes: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Work whose time grows with so many bytes."""
    if size_bytes <= LARGE_BODY_BYTES:
        return work(*args, **kwargs)
    validators: ThreadPoolExecutor = getattr(request.state, VALIDATORS)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(validators, lambda: work(*args, **kwargs))


class _ValidatedRequest(Request):
    validated: Any = None

    async def json(self) -> Any:
        """What FastAPI validates as JSON; a model of the right type passes as it is."""
        return self.validated


def _as_json(scope: Scope) -> Scope:
    """A body is read as JSON whatever it is called: the middleware decides which may come."""
    others = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
    return {**scope, "headers": [*others, (b"content-type", b"application/json")]}


class JsonRoute(APIRoute):
    def get_route_handler(self) -> Any:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            request = _ValidatedRequest(_as_json(request.scope), request.receive)
            # Here its errors keep their status; FastAPI makes them all 400.
            if await request.body() and self.body_field is not None:
                request.validated = await beside_loop(request, self._validate, await request.body())
            response: Response = await handler(request)
            return response

        return handle

    def _validate(self, content: bytes) -> Any:
        assert self.body_field is not None
        try:
            parsed = orjson.loads(content)
        except json.JSONDecodeError as error:
            problem = {"type": "json_invalid", "loc": ("body",), "ctx": {"error": error.msg}}
            raise RequestValidationError([problem]) from None
        validated, errors = self.body_field.validate(parsed, loc=("body",))
        if errors:
            raise RequestValidationError(errors)
        return validated
