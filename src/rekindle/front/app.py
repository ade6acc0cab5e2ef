"""Builds the HTTP application: its routes, its middleware and its error responses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache, partial
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from rekindle.api.anthropic import routes as anthropic
from rekindle.api.anthropic.errors import ANTHROPIC_ERRORS, speaks_anthropic
from rekindle.api.base import fields
from rekindle.api.base.documents import DOCUMENT_SLOTS, DocumentSlots
from rekindle.api.base.loading import UsesMiddleware
from rekindle.api.base.models import ServedModels
from rekindle.api.base.request import MEDIA
from rekindle.api.base.residence import router as residence_router
from rekindle.api.cache import entries, files, internal, live, prepare, stats
from rekindle.api.llama_server import routes as llama_server
from rekindle.api.llama_server.errors import LLAMA_ERRORS, speaks_llama_server
from rekindle.api.ollama import embed as ollama_embed
from rekindle.api.ollama import library as ollama_library
from rekindle.api.ollama import models as ollama_models
from rekindle.api.ollama import routes as ollama
from rekindle.api.ollama.reply import OLLAMA_ERRORS, speaks_ollama
from rekindle.api.openai import embeddings
from rekindle.api.openai import routes as openai
from rekindle.api.openai import stored as stored_completions
from rekindle.api.rerank import routes as rerank
from rekindle.api.responses import conversations
from rekindle.api.responses import routes as responses
from rekindle.api.responses.background import BACKGROUND, BackgroundResponses
from rekindle.api.responses.errors import RESPONSES_ERRORS, speaks_responses
from rekindle.api.responses.reply import OPEN_RESPONSES, OpenResponses
from rekindle.api.tokens import routes as tokens
from rekindle.config import Config
from rekindle.errors import NotFound, ServerError
from rekindle.front import console, docs, health, metrics, tenants
from rekindle.front.openapi import EVERY_OPERATION, DocumentedApp
from rekindle.front.request_metrics import REQUEST_METRICS, RequestMetrics
from rekindle.front.traces import Tracer, open_tracer
from rekindle.http.auth import KEYS, Keys
from rekindle.http.body import VALIDATORS, open_validators
from rekindle.http.key_file import KeyFile
from rekindle.http.limits import ACCOUNTS, Accounts
from rekindle.http.logs import log_request
from rekindle.http.middleware import Drain, RequestMiddleware
from rekindle.http.records import CLIENT_GONE, note_error
from rekindle.http.responses import (
    OPENAI_ERRORS,
    ClientGone,
    ErrorFormat,
    ErrorResponse,
    documented,
)
from rekindle.media.loader import MediaLoader
from rekindle.version import __version__

log = logging.getLogger("rekindle.api")

#: All endpoints. The first matching route wins: statistics come before entries, because any other
#: path under /v1/cache is a cache key, and Anthropic's list of models, which is for clients that
#: send `anthropic-version`, comes before OpenAI's.
ROUTERS = (
    tokens.router,
    openai.router,
    stored_completions.router,
    embeddings.router,
    rerank.router,
    responses.router,
    conversations.router,
    anthropic.router,
    anthropic.models_router,
    ollama.router,
    ollama_models.router,
    ollama_embed.router,
    ollama_models.pull_router,
    ollama_library.router,
    residence_router,
    openai.models_router,
    health.router,
    llama_server.router,
    prepare.router,
    files.router,
    stats.router,
    live.router,
    entries.listing_router,
    entries.router,
    internal.router,
    tenants.router,
    metrics.router,
    docs.router,
    console.settings_router,
    console.router,
)


def build_app(
    config: Config,
    models: ServedModels,
    keys: Keys | None = None,
    drain: Drain | None = None,
) -> RequestMiddleware:
    keys, accounts = keys or api_keys(config), Accounts()
    of_requests = RequestMetrics()
    tracer = open_tracer(config)
    shared = {KEYS: keys, ACCOUNTS: accounts, REQUEST_METRICS: of_requests}
    app = DocumentedApp(
        title="Rekindle",
        version=__version__,
        summary="An OpenAI-compatible inference server that keeps and reuses the KV cache of every "
        "conversation.",
        lifespan=partial(_lifespan, config, models, shared, tracer),
        redirect_slashes=False,  # a redirect would echo a forged Host header
        docs_url=None,  # FastAPI's pages load scripts from a CDN
        redoc_url=None,
    )
    app.router.routes.extend(_routes())
    for kind in (ServerError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _on_error)
    for gone in (ClientGone, ClientDisconnect):
        app.add_exception_handler(gone, _on_client_gone)
    return RequestMiddleware(
        UsesMiddleware(app),
        keys,
        config.host,
        drain=drain,
        names=config.allowed_host,
        origins=config.cors_origin,
        versioned=_versioned(),
        error_format=_error_format,
        accounts=accounts,
        observers=[log_request, of_requests.observe, *([tracer.observe] if tracer else [])],
    )


@cache
def _routes() -> list[BaseRoute]:
    """Return the routes of all APIs. Building their validators takes 0.1 s, and the applications of
    a process share them."""
    shared = FastAPI(responses=documented(*EVERY_OPERATION), openapi_url=None)
    for router in ROUTERS:
        shared.include_router(router)
    return list(shared.router.routes)


def api_keys(config: Config) -> Keys:
    """Return the API keys in the settings. Raises ConfigError if the key file cannot be read."""
    file = KeyFile(config.api_keys_file) if config.api_keys_file else None
    return Keys(config.api_key, admin=config.admin_key, file=file)


@asynccontextmanager
async def _lifespan(
    config: Config,
    models: ServedModels,
    shared: dict[str, Any],
    tracer: Tracer | None,
    _app: FastAPI,
) -> AsyncIterator[dict[str, Any]]:
    """Yield the state that requests share, from the start of the server to its end. `shared` is the
    part of it that is known before."""
    await asyncio.to_thread(files.remove_left_over_folders)
    media = MediaLoader(allowed=config.media_allow, folders=config.media_folder)
    background = BackgroundResponses()
    try:
        with open_validators() as validators:
            yield {
                **shared,
                "models": models,
                VALIDATORS: validators,
                MEDIA: media,
                files.TRANSFERS: files.Transfers(),
                OPEN_RESPONSES: OpenResponses(),
                BACKGROUND: background,
                conversations.CONVERSATION_LOCKS: conversations.ConversationLocks(),
                DOCUMENT_SLOTS: DocumentSlots(),
                live.LIVE_FEED: live.LiveFeed(),
            }
    finally:
        await background.close()
        await media.close()
        if tracer is not None:
            await asyncio.to_thread(tracer.close)


def _versioned() -> set[str]:
    """Return the first word after /v1/ of every path."""
    routes = (route for router in ROUTERS for route in router.routes)
    paths = [route.path for route in routes if isinstance(route, APIRoute)]
    return {path.split("/")[2] for path in paths if path.startswith("/v1/")}


def _error_format(path: str, headers: Headers) -> ErrorFormat:
    if speaks_anthropic(path, headers):
        return ANTHROPIC_ERRORS
    if speaks_responses(path):
        return RESPONSES_ERRORS
    if speaks_llama_server(path):
        return LLAMA_ERRORS
    return OLLAMA_ERRORS if speaks_ollama(path) else OPENAI_ERRORS


class MethodNotAllowed(NotFound):
    status, code = 405, "method_not_allowed"


async def _on_error(request: Request, error: Exception) -> Response:
    match error:
        case ServerError():
            return ErrorResponse(error, request.scope)
        case RequestValidationError():
            return ErrorResponse(fields.explain(error.errors()), request.scope)
        case HTTPException():  # the router's errors: an unknown path, or a wrong method
            kind = MethodNotAllowed if error.status_code == MethodNotAllowed.status else NotFound
            path = request.scope["path"][:128]  # request.url would raise if the Host is invalid
            unserved = kind(f"{request.method} {path} is not served here; see /docs.")
            response = ErrorResponse(unserved, request.scope)
            response.headers.update(error.headers or {})
            return response
    route = getattr(request.scope.get("route"), "path", "no route")  # a path may be a cache key
    log.exception("unexpected error on %s", route, exc_info=error)
    unexpected = ServerError("an unexpected error happened; the server's log has the details")
    return ErrorResponse(unexpected, request.scope)


async def _on_client_gone(request: Request, _error: Exception) -> Response:
    note_error(request.scope, CLIENT_GONE)
    return Response(status_code=499)  # for the log, because nobody receives it
