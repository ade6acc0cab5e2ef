"""Reads request bodies within limits, and parses JSON off the event loop if it is large."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import orjson
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope

from rekindle.errors import BadRequest, TooManyRequests, Unavailable

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BodyLimits:
    body_bytes: int = 64 << 20
    timeout_s: float = 120.0  # enough for a large body over a slow connection
    punctuation: int = 500_000  # parsing time grows with it; this much takes 0.1 s
    held_bytes: int = 512 << 20  # of all requests in flight
    caller_held_bytes: int = 256 << 20  # of one caller's requests in flight


LIMITS = BodyLimits()
PUNCTUATION = b",:[{"  # every JSON value needs one of these
VALUE_BYTES = 64  # memory of a small JSON value, such as an empty list, after parsing
BODY = "rekindle.body"  # the LimitedBody's key in the request's scope
VALIDATORS = "validators"  # the thread pool's name in the application's state
LARGE_BODY_BYTES = 64 << 10  # a smaller body is parsed within a millisecond


class BodyTooLarge(BadRequest):
    status, code = 413, "body_too_large"

    def __init__(self) -> None:
        super().__init__(f"A request may have at most {LIMITS.body_bytes} bytes.")


class TooManyValues(BadRequest):
    code = "too_many_values"

    def __init__(self) -> None:
        super().__init__(
            f"The body has more than {LIMITS.punctuation} commas, colons and opening brackets: "
            "send fewer or shorter messages."
        )


class BodyTooSlow(BadRequest):
    status, code = 408, "body_too_slow"

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"The request's body did not arrive within {limit_s:g} seconds.")


async def _receive_until(deadline_s: float, receive: Receive) -> Message:
    """Receive the next part of a body. The deadline is in the time of the event loop."""
    try:
        async with asyncio.timeout_at(deadline_s):
            return await receive()
    except TimeoutError:
        raise BodyTooSlow(LIMITS.timeout_s) from None


def _deadline_s() -> float:
    return asyncio.get_running_loop().time() + LIMITS.timeout_s


def _punctuation(part: bytes) -> int:
    return len(part) - len(part.translate(None, PUNCTUATION))


def check_message(content: bytes) -> None:
    """Apply the limits of a body to a WebSocket message, before it is parsed."""
    if len(content) > LIMITS.body_bytes:
        raise BodyTooLarge
    if _punctuation(content) > LIMITS.punctuation:
        raise TooManyValues


def check_announced_size(content_length: str) -> None:
    """Refuse a body by its Content-Length header, before reading it."""
    if content_length.isdecimal() and int(content_length[:20]) > LIMITS.body_bytes:
        raise BodyTooLarge


class HeldBytes:
    """Counts the memory of all requests in flight, in total and per caller."""

    def __init__(self) -> None:
        self.by_caller: Counter[bytes] = Counter()
        self._total = 0

    def add(self, caller: bytes, size_bytes: int) -> None:
        """Count the bytes, or raise if the limit is reached."""
        self._check(caller, size_bytes)
        self.add_anyway(caller, size_bytes)

    def add_anyway(self, caller: bytes, size_bytes: int) -> None:
        """Count the bytes, even beyond the limit."""
        self.by_caller[caller] += size_bytes
        self._total += size_bytes

    def _check(self, caller: bytes, size_bytes: int) -> None:
        if self.by_caller[caller] + size_bytes > LIMITS.caller_held_bytes:
            raise TooManyRequests(
                f"Your requests in flight may have {LIMITS.caller_held_bytes} bytes in all; "
                "try again when some are answered."
            )
        if self._total + size_bytes > LIMITS.held_bytes:
            raise Unavailable("The requests in flight use all memory for them; try again later.")

    def remove(self, caller: bytes, size_bytes: int) -> None:
        self._total -= size_bytes
        self.by_caller[caller] -= size_bytes
        if not self.by_caller[caller]:
            del self.by_caller[caller]


class LimitedBody:
    """Replaces ASGI's `receive`, and limits the size of the body and the time to receive it.

    The received bytes, and an estimate of the values in them, count in `held` until `close`.
    """

    def __init__(self, receive: Receive, held: HeldBytes, caller: bytes) -> None:
        self._receive = receive
        self._held = held
        self._caller = caller
        self._body_bytes = 0
        self._held_bytes = 0  # the body, what is parsed from it, and other memory
        self._punctuation = 0
        self._complete = False
        self._deadline_s: float | None = None

    def close(self) -> None:
        self._held.remove(self._caller, self._held_bytes)
        self._body_bytes = self._held_bytes = 0

    def hold(self, size_bytes: int) -> None:
        """Count other memory of this request, such as decoded images, or raise."""
        self._held.add(self._caller, size_bytes)
        self._held_bytes += size_bytes

    @contextmanager
    def holding(self, size_bytes: int, *, refuses: bool = True) -> Iterator[None]:
        """Count memory until the block ends, which may be after `close`.

        Raises like `hold`, unless the memory is needed to finish an answer (`refuses=False`).
        """
        add = self._held.add if refuses else self._held.add_anyway
        add(self._caller, size_bytes)
        try:
            yield
        finally:
            self._held.remove(self._caller, size_bytes)

    async def receive(self) -> Message:
        if self._complete:
            return await self._receive()
        if self._deadline_s is None:
            self._deadline_s = _deadline_s()
        message = await _receive_until(self._deadline_s, self._receive)
        self._check(message.get("body", b""))
        self._complete = not message.get("more_body", False)
        return message

    def _check(self, part: bytes) -> None:
        if self._body_bytes + len(part) > LIMITS.body_bytes:
            raise BodyTooLarge
        punctuation = _punctuation(part)
        size_bytes = len(part) + VALUE_BYTES * punctuation
        self._held.add(self._caller, size_bytes)
        self._held_bytes += size_bytes
        self._body_bytes += len(part)
        self._punctuation += punctuation
        if self._punctuation > LIMITS.punctuation:
            raise TooManyValues


def upload(receive: Receive) -> Receive:
    """Replace ASGI's `receive` for a file, which its route writes to disk as it arrives.

    The size is not limited, but each part has to arrive in time.
    """

    async def receive_part() -> Message:
        return await _receive_until(_deadline_s(), receive)

    return receive_part


def body_of(request: Request) -> LimitedBody:
    body: LimitedBody = request.scope[BODY]
    return body


def open_validators() -> ThreadPoolExecutor:
    """Open the threads for large bodies: few, because they compete for the interpreter lock."""
    return ThreadPoolExecutor(2, VALIDATORS)


async def run_off_loop(
    request: Request, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Run work whose time grows with the request's body, in a thread if the body is large."""
    size_bytes = len(await request.body())
    return await run_off_loop_if_large(request, size_bytes, work, *args, **kwargs)


async def run_off_loop_if_large(
    request: Request, size_bytes: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Run work whose time grows with `size_bytes`, in a thread if that is large."""
    if size_bytes <= LARGE_BODY_BYTES:
        return work(*args, **kwargs)
    validators: ThreadPoolExecutor = getattr(request.state, VALIDATORS)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(validators, lambda: work(*args, **kwargs))


class _ValidatedRequest(Request):
    validated: Any = None

    async def json(self) -> Any:
        """Return the validated body. FastAPI accepts an instance of the right model as it is."""
        return self.validated


class JsonRoute(APIRoute):
    """Parses bodies with orjson, which rejects NaN and excessive nesting."""

    def get_route_handler(self) -> Any:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            request = _ValidatedRequest(_as_json(request.scope), request.receive)
            # Errors raised here keep their status. FastAPI would turn them all into 400.
            if await request.body() and self.body_field is not None:
                request.validated = await run_off_loop(
                    request, self._validate, await request.body()
                )
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


def _as_json(scope: Scope) -> Scope:
    """Set the content type to JSON. The middleware has checked the client's content type."""
    others = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
    return {**scope, "headers": [*others, (b"content-type", b"application/json")]}
