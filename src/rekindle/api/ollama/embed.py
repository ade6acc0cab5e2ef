"""Serves /api/embed and the older /api/embeddings."""

from __future__ import annotations

import time

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rekindle.api.base.loading import loaded
from rekindle.api.base.models import models_of
from rekindle.api.base.reply import VectorsResponse, result_of, vectors
from rekindle.api.ollama.keep_alive import set_keep_alive
from rekindle.api.ollama.models import bare
from rekindle.api.ollama.reply import NS, OllamaErrorBody
from rekindle.api.ollama.schema import OllamaEmbedRequest
from rekindle.http.auth import caller_of
from rekindle.http.body import JsonRoute, run_off_loop_if_large
from rekindle.http.middleware import received_s
from rekindle.http.responses import documented, while_connected
from rekindle.protocol.events import Embedded
from rekindle.protocol.requests import EmbedRequest
from rekindle.worker.client import RuntimeClient

router = APIRouter(
    route_class=JsonRoute, tags=["ollama"], responses=documented(400, model=OllamaErrorBody)
)


@router.post("/api/embed")
async def embed(body: OllamaEmbedRequest, request: Request) -> Response:
    """Compute a normalised vector for each input."""
    models = models_of(request)
    runtime = await loaded(request, models.embedder(bare(body.model, models)))
    embedded = await _embedded(body, request, runtime)
    answer = {
        "model": body.model or runtime.name,
        "embeddings": vectors(embedded),
        "total_duration": int((time.monotonic() - received_s(request)) * NS),
        "load_duration": 0,
        "prompt_eval_count": embedded.prompt_tokens,
    }
    size_bytes = len(embedded.vectors)
    return await run_off_loop_if_large(request, size_bytes, VectorsResponse, answer)


@router.post("/api/embeddings")
async def embed_prompt(body: OllamaEmbedRequest, request: Request) -> Response:
    """Compute the vector of `prompt`, for older clients."""
    models = models_of(request)
    runtime = await loaded(request, models.embedder(bare(body.model, models)))
    embedded = await _embedded(body, request, runtime)
    found = vectors(embedded)
    return VectorsResponse({"embedding": found[0] if len(found) else []})


async def _embedded(body: OllamaEmbedRequest, request: Request, runtime: RuntimeClient) -> Embedded:
    set_keep_alive(models_of(request), runtime, body.keep_alive)
    if not body.inputs:
        return Embedded(0, b"", runtime.loaded.dimensions, prompt_tokens=0, reused_tokens=0)
    wanted = EmbedRequest(
        inputs=list(body.inputs),
        truncate=body.truncate is not False,
        dimensions=body.dimensions,
        reuse=models_of(request).config.context_cache,
        salt=caller_of(request).salt,
    )
    return await while_connected(request, result_of(runtime, wanted, Embedded))
