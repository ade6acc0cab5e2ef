"""Serves /v1/chat/completions, /v1/completions and /v1/models."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rekindle.api.base.loading import answer_when_loaded
from rekindle.api.base.models import ModelNumber, ServedModels, models_of
from rekindle.api.base.request import RequestBuilder, render_chat
from rekindle.api.openai.reply import ChatReply, TextReply
from rekindle.api.openai.request import chat_requests, completion_requests
from rekindle.api.openai.schema import ChatRequest, CompletionRequest
from rekindle.http.body import JsonRoute, run_off_loop
from rekindle.http.responses import MAY_STREAM, JsonResponse
from rekindle.protocol.requests import IMAGE
from rekindle.worker.client import RuntimeClient

router = APIRouter(route_class=JsonRoute)
models_router = APIRouter(route_class=JsonRoute, tags=["models"])


@router.post("/v1/chat/completions", responses=MAY_STREAM, tags=["chat"])
async def create_chat_completion(
    body: ChatRequest, request: Request, number: ModelNumber = None
) -> Response:
    """Answer a conversation. State that was computed for an equal prefix is reused."""
    runtime = models_of(request).runtime(body.model, number)
    answer = partial(_answer_chat, body, request, runtime)
    return await answer_when_loaded(request, runtime, answer, stream=bool(body.stream))


async def _answer_chat(body: ChatRequest, request: Request, runtime: RuntimeClient) -> Response:
    chat = await render_chat(request, runtime, body.messages, body.resize)
    builder = RequestBuilder.of(request, runtime)
    requests = await run_off_loop(request, chat_requests, body, builder, chat)
    others = models_of(request).others(runtime)
    reply = ChatReply(request, runtime, requests, body, others=others)
    return await reply.respond(stream=bool(body.stream))


@router.post("/v1/completions", responses=MAY_STREAM, tags=["completions"])
async def create_completion(
    body: CompletionRequest, request: Request, number: ModelNumber = None
) -> Response:
    """Continue a text, or each of a list of texts."""
    runtime = models_of(request).runtime(body.model, number)
    answer = partial(_complete, body, request, runtime)
    return await answer_when_loaded(request, runtime, answer, stream=bool(body.stream))


async def _complete(body: CompletionRequest, request: Request, runtime: RuntimeClient) -> Response:
    builder = RequestBuilder.of(request, runtime)
    requests = await run_off_loop(request, completion_requests, body, builder)
    others = models_of(request).others(runtime)
    reply = TextReply(request, runtime, requests, body, others=others)
    return await reply.respond(stream=bool(body.stream))


@models_router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """List the models that this server serves."""
    models = models_of(request)
    listed = [_model(runtime, models) for runtime in models.all]
    native = [_native_model(runtime, models) for runtime in models.all]
    return JsonResponse({"object": "list", "data": listed, "models": native})


@models_router.get("/v1/models/{model:path}")
async def retrieve_model(model: str, request: Request) -> Response:
    """Show one model."""
    if not model:  # the list's path with a slash at the end
        return await list_models(request)
    models = models_of(request)
    return JsonResponse(_model(models.any(model), models))


def _model(runtime: RuntimeClient, models: ServedModels) -> dict[str, Any]:
    ready = runtime.described
    is_embedder = ready is not None and ready.dimensions and not ready.ranks
    return {
        "id": runtime.name,
        "object": "model",
        "created": models.started_at,
        "owned_by": "rekindle",
        "status": models.pool.model(runtime).status,
        "aliases": models.aliases_of(runtime),
        "modalities": list(ready.modalities) if ready else None,
        "max_model_len": ready.context_tokens if ready else None,
        "meta": {"n_ctx": ready.context_tokens, "n_vocab": ready.vocabulary} if ready else None,
        **({"dimensions": ready.dimensions} if ready and is_embedder else {}),
    }


def _native_model(runtime: RuntimeClient, models: ServedModels) -> dict[str, Any]:
    """A model as llama.cpp's server lists it, for clients that ask what it can do."""
    ready, file = runtime.described, runtime.file
    capabilities = ["embedding" if models.is_embedder(runtime) else "completion"]
    if ready and IMAGE in ready.modalities:
        capabilities.append("multimodal")
    return {
        "name": runtime.name,
        "model": runtime.name,
        "type": "model",
        "description": "",
        "tags": [],
        "capabilities": capabilities,
        "parameters": "",
        "details": {"format": file.format, "family": ready.architecture if ready else ""},
        "size": file.size_bytes,
    }
