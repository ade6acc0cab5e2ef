"""The HTTP application: routes, middleware, and the one place where errors become JSON."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from rekindle.api import validation
from rekindle.api.anthropic import models as anthropic_models
from rekindle.api.anthropic import routes as messages
from rekindle.api.anthropic.errors import ANTHROPIC_ERRORS, speaks_anthropic
from rekindle.api.cache import files, internal, listing, prepare, routes, stats
from rekindle.api.illustration import MEDIA
from rekindle.api.ollama import embed as ollama_embed
from rekindle.api.ollama import models as ollama_models
from rekindle.api.ollama import pull as ollama_pull
from rekindle.api.ollama import routes as ollama
from rekindle.api.ollama.errors import OLLAMA_ERRORS, speaks_ollama
from rekindle.api.openai import chat, completions, embeddings, models
from rekindle.api.props import routes as props
from rekindle.api.rerank import routes as rerank
from rekindle.api.responses import conversations
from rekindle.api.responses import retrieval as stored_responses
from rekindle.api.responses import routes as responses
from rekindle.api.responses.conversation_store import CONVERSATION_LOCKS, ConversationLocks
from rekindle.api.responses.errors import RESPONSES_ERRORS, speaks_responses
from rekindle.api.responses.open_responses import OPEN_RESPONSES, OpenResponses
from rekindle.api.responses.stored import DOCUMENT_SLOTS, DocumentSlots
from rekindle.api.tokens import routes as tokens
from rekindle.config import Config
from rekindle.errors import NotFound, ServerError
from rekindle.media.loader import MediaLoader
from rekindle.server import metrics, pages
from rekindle.server.auth import Keys
from rekindle.server.drain import Drain
from rekindle.server.json_route import VALIDATORS, open_validators
from rekindle.server.middleware import RequestMiddleware
from rekindle.server.models import ServedModels
from rekindle.server.openapi import EVERY_OPERATION, DocumentedApp
from rekindle.server.responses import OPENAI_ERRORS, ErrorFormat, ErrorResponse, documented
from rekindle.server.turns import ClientGone
from rekindle.version import __version__

log = logging.getLogger("rekindle.api")

CLIENT_CLOSED_REQUEST = 499

OpenModels = Callable[[], AbstractAsyncContextManager[ServedModels]]


# An endpoint is served by being listed here. Statistics come before entries: any other path under
# /v1/cache is a cache key. Anthropic's list of models comes before OpenAI's: it is for clients that
# send `anthropic-version`.
ENDPOINTS = (
    chat,
    completions,
    embeddings,
    rerank,
    responses,
    stored_responses,
    conversations,
    messages,
    anthropic_models,
    ollama,
    ollama_models,
    ollama_embed,
    ollama_pull,
    models,
    props,
    prepare,
    files,
    stats,
    listing,
    routes,
    internal,
    tokens,
    metrics,
    pages,
)


def build_app(
    config: Config,
    open_models: OpenModels,
    keys: Keys | None = None,
    drain: Drain | None = None,
) -> RequestMiddleware:
    app = DocumentedApp(
        title="Rekindle",
        version=__version__,
        summary="An OpenAI-compatible server that never computes the same prompt twice.",
        lifespan=partial(_lifespan, config, open_models),
        redirect_slashes=False,  # a redirect would repeat a forged Host header
        responses=documented(*EVERY_OPERATION),
        docs_url=None,  # FastAPI's pages load their scripts from elsewhere
        redoc_url=None,
    )
    for endpoint in ENDPOINTS:
        app.include_router(endpoint.router)
    app.add_exception_handler(ServerError, _on_server_error)
    app.add_exception_handler(RequestValidationError, _on_invalid_request)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientGone, _on_client_gone)
    app.add_exception_handler(ClientDisconnect, _on_client_gone)
    app.add_exception_handler(Exception, _on_unexpected_error)
    return RequestMiddleware(
        (drain or Drain()).guard(app),
        keys or Keys.of(config),
        config.host,
        origins=config.cors_origin,
        versioned=_versioned(),
        error_format=_error_format,
    )


@asynccontextmanager
async def _lifespan(
    config: Config, open_models: OpenModels, _app: FastAPI
) -> AsyncIterator[dict[str, Any]]:
    """What requests share, from the start of the server to its end."""
    async with open_models() as models:
        media = MediaLoader(allowed=config.media_allow, folders=config.media_folder)
        try:
            with open_validators() as validators:
                yield {
                    "models": models,
                    VALIDATORS: validators,
                    MEDIA: media,
                    files.TRANSFERS: files.Transfers(),
                    OPEN_RESPONSES: OpenResponses(),
                    CONVERSATION_LOCKS: ConversationLocks(),
                    DOCUMENT_SLOTS: DocumentSlots(),
                }
        finally:
            await media.close()


def _versioned() -> set[str]:
    """The first words after /v1/ of all paths."""
    routes = (route for endpoint in ENDPOINTS for route in endpoint.router.routes)
    paths = [route.path for route in routes if isinstance(route, APIRoute)]
    return {path.split("/")[2] for path in paths if path.startswith("/v1/")}


def _error_format(path: str, headers: Headers) -> ErrorFormat:
    if speaks_anthropic(path, headers):
        return ANTHROPIC_ERRORS
    if speaks_responses(path):
        return RESPONSES_ERRORS
    return OLLAMA_ERRORS if speaks_ollama(path) else OPENAI_ERRORS


class MethodNotAllowed(NotFound):
    status, code = 405, "method_not_allowed"


async def _on_server_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServerError)
    return ErrorResponse(error, request.scope)


async def _on_invalid_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return ErrorResponse(validation.explain(error.errors()), request.scope)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """The router's own errors: no such path, or not with this method."""
    assert isinstance(error, HTTPException)
    kind = MethodNotAllowed if error.status_code == MethodNotAllowed.status else NotFound
    path = request.scope["path"][:128]  # not request.url: an odd Host makes that raise
    unserved = kind(f"{request.method} {path} is not served here; see /docs.")
    response = ErrorResponse(unserved, request.scope)
    response.headers.update(error.headers or {})
    return response


async def _on_client_gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)  # for the log: nobody receives it


async def _on_unexpected_error(request: Request, error: Exception) -> Response:
    route = getattr(request.scope.get("route"), "path", "no route")  # a path may hold a cache key
    log.exception("unexpected error on %s", route, exc_info=error)
    unexpected = ServerError("an unexpected error happened; the server's log has the details")
    return ErrorResponse(unexpected, request.scope)
