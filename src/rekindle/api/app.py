"""The HTTP application: routes, the edge, and the one place where errors become JSON."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from rekindle import __version__
from rekindle.api import chat, completions, models
from rekindle.api.auth import Keys
from rekindle.api.guard import Guard
from rekindle.api.json import JsonResponse
from rekindle.api.service import Service
from rekindle.api.turns import ClientGone
from rekindle.config import Config
from rekindle.errors import BadRequest, NotFound, ServerError

log = logging.getLogger("rekindle.api")

CLIENT_CLOSED_REQUEST = 499
RETRY_AFTER_S = "1"

OpenService = Callable[[], AbstractAsyncContextManager[Service]]


def build_app(config: Config, open_service: OpenService) -> Guard:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, Any]]:
        async with open_service() as service:
            yield {"service": service}

    app = FastAPI(
        title="Rekindle",
        version=__version__,
        summary="An OpenAI-compatible server that never computes the same prompt twice.",
        lifespan=lifespan,
    )
    for part in (chat, completions, models):
        app.include_router(part.router)
    app.add_exception_handler(ServerError, _on_server_error)
    app.add_exception_handler(RequestValidationError, _on_invalid_request)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientGone, _on_client_gone)
    app.add_exception_handler(Exception, _on_bug)
    return Guard(app, Keys(config.api_key), config.host)


def _error(error: ServerError) -> Response:
    headers = {"retry-after": RETRY_AFTER_S} if error.status in (429, 503) else None
    return JsonResponse(error.body(), status_code=error.status, headers=headers)


async def _on_server_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ServerError)
    return _error(error)


async def _on_invalid_request(_request: Request, error: Exception) -> Response:
    """The first thing that is wrong, with the field's name as the client wrote it."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return _error(BadRequest(f"The body is not valid JSON: {first['ctx']['error']}"))
    path = [str(part) for part in first["loc"] if part != "body"]
    field = path[0] if path else None
    where = f"`{'.'.join(path)}`" if path else "The body"
    return _error(BadRequest(f"{where}: {first['msg']}", param=field))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    problem = NotFound(f"{request.method} {request.url.path} is not served: {error.detail}")
    problem.status = error.status_code
    return _error(problem)


async def _on_client_gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)  # nobody reads it; the log does


async def _on_bug(request: Request, error: Exception) -> Response:
    log.exception("unexpected error on %s", request.url.path, exc_info=error)
    return _error(ServerError("an unexpected error happened; the server's log has the details"))
