"""Serves /api/embed and the older /api/embeddings."""

from __future__ import annotations

import time
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rekindle.api.base.admin import AdminClient
from rekindle.api.base.models import models_of
from rekindle.api.base.reply import result_of, while_connected
from rekindle.api.ollama.models import bare
from rekindle.api.ollama.reply import NS, OllamaErrorBody
from rekindle.api.ollama.schema import OllamaEmbedRequest
from rekindle.http.auth import caller_of
from rekindle.http.body import JsonRoute, run_off_loop
from rekindle.http.middleware import received_s
from rekindle.http.responses import documented
from rekindle.protocol.admin import Tokenize, Tokenized
from rekindle.protocol.embeddings import Embedded, EmbedRequest
from rekindle.worker.client import RuntimeClient

router = APIRouter(
    route_class=JsonRoute, tags=["ollama"], responses=documented(400, model=OllamaErrorBody)
)


@router.post("/api/embed")
async def embed(body: OllamaEmbedRequest, request: Request) -> Response:
    """Compute a normalised vector for each input."""
    models = models_of(request)
    runtime = models.embedder(bare(body.model, models))
    embedded = await _embedded(body, request, runtime)
    content = await run_off_loop(
        request, _rendered, embedded, body.model or runtime.name, received_s(request)
    )
    return Response(content, media_type="application/json")


@router.post("/api/embeddings")
async def embed_prompt(body: OllamaEmbedRequest, request: Request) -> Response:
    """Compute the vector of `prompt`, for older clients."""
    models = models_of(request)
    embedded = await _embedded(body, request, models.embedder(bare(body.model, models)))
    vectors = _vectors(embedded)
    first = {"embedding": vectors[0] if len(vectors) else []}
    return Response(
        orjson.dumps(first, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json"
    )


async def _embedded(body: OllamaEmbedRequest, request: Request, runtime: RuntimeClient) -> Embedded:
    if not body.inputs:
        return Embedded(0, b"", runtime.loaded.dimensions, prompt_tokens=0, reused_tokens=0)
    client = AdminClient.of_tenant(request)
    inputs = [
        text if body.truncate is False else await _shortened(text, client, runtime)
        for text in body.inputs
    ]
    wanted = EmbedRequest(
        inputs=inputs,
        dimensions=body.dimensions,
        reuse=models_of(request).config.context_cache,
        salt=caller_of(request).salt,
    )
    return await while_connected(request, result_of(runtime, wanted, Embedded))


async def _shortened(text: str, client: AdminClient, runtime: RuntimeClient) -> str | list[int]:
    """Truncate a text to the model's context. The last token, a special one, is kept."""
    limit = runtime.loaded.context_tokens
    # A token has at least one byte, and models add at most two special tokens.
    if len(text.encode(errors="replace")) + 2 <= limit:
        return text
    question = Tokenize(text=text, add_special=True, parse_special=False)
    tokens = (await client.request(runtime, question, Tokenized)).tokens
    return tokens if len(tokens) <= limit else [*tokens[: limit - 1], tokens[-1]]


def _rendered(embedded: Embedded, model: str, began_s: float) -> bytes:
    body = {
        "model": model,
        "embeddings": _vectors(embedded),
        "total_duration": int((time.monotonic() - began_s) * NS),
        "load_duration": 0,
        "prompt_eval_count": embedded.prompt_tokens,
    }
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def _vectors(embedded: Embedded) -> Any:
    import numpy as np  # slow to import, and most servers do not need it

    return np.frombuffer(embedded.vectors, "<f4").reshape(-1, embedded.dimensions)
