"""Serves /v1/embeddings."""

from __future__ import annotations

from base64 import b64encode
from typing import Annotated, Literal

from fastapi import APIRouter
from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import Response

from rekindle.api.base.fields import Count, PromptInput, StrictModel, as_prompts, limit_inputs
from rekindle.api.base.loading import loaded
from rekindle.api.base.models import models_of
from rekindle.api.base.reply import VectorsResponse, embedder_usage, result_of, vectors
from rekindle.http.auth import caller_of
from rekindle.http.body import JsonRoute, run_off_loop_if_large
from rekindle.http.responses import while_connected
from rekindle.protocol.events import Embedded
from rekindle.protocol.requests import EmbedRequest

router = APIRouter(route_class=JsonRoute, tags=["embeddings"])


class EmbeddingRequest(StrictModel):
    input: Annotated[PromptInput, BeforeValidator(limit_inputs)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = Field(
        None, description="Truncate each vector to this many numbers and normalise it again"
    )
    batch_size: Count | None = Field(
        None, description="Largest number of inputs that are computed in one batch"
    )
    user: str | None = None
    use_kv_cache: bool | None = Field(None, description="False: compute every input again")


@router.post("/v1/embeddings")
async def create_embedding(body: EmbeddingRequest, request: Request) -> Response:
    """Compute a normalised vector for each input. Equal inputs are computed once."""
    models = models_of(request)
    runtime = await loaded(request, models.embedder(body.model))
    wanted = EmbedRequest(
        inputs=as_prompts(body.input),
        dimensions=body.dimensions,
        batch_size=body.batch_size,
        reuse=models.config.context_cache and body.use_kv_cache is not False,
        salt=caller_of(request).salt,
    )
    embedded = await while_connected(request, result_of(runtime, wanted, Embedded))
    size_bytes, form = len(embedded.vectors), body.encoding_format
    return await run_off_loop_if_large(request, size_bytes, _answer, embedded, runtime.name, form)


def _answer(embedded: Embedded, model: str, encoding_format: str | None) -> Response:
    shown = _base64(embedded) if encoding_format == "base64" else vectors(embedded)
    data = [
        {"object": "embedding", "index": index, "embedding": vector}
        for index, vector in enumerate(shown)
    ]
    usage = embedder_usage(embedded)
    return VectorsResponse({"object": "list", "data": data, "model": model, "usage": usage})


def _base64(embedded: Embedded) -> list[str]:
    size = 4 * embedded.dimensions  # bytes of its 32-bit floats
    view = memoryview(embedded.vectors)
    starts = range(0, len(view), size)
    return [b64encode(view[start : start + size]).decode() for start in starts]
