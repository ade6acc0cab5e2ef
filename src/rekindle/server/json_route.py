"""Routes whose body is JSON: parsed by orjson and validated, beside the event loop if it is large.

orjson refuses NaN and absurd nesting.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

import orjson
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

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
