"""Serves /v1/embeddings."""

from __future__ import annotations

from base64 import b64encode
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter
from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import Response

from rekindle.api.base.fields import Count, PromptInput, StrictModel, as_prompts
from rekindle.api.base.models import models_of
from rekindle.api.base.reply import result_of, while_connected
from rekindle.http.auth import caller_of
from rekindle.http.body import JsonRoute, run_off_loop
from rekindle.protocol.embeddings import Embedded, EmbedRequest

router = APIRouter(route_class=JsonRoute, tags=["embeddings"])

MAX_INPUTS = 2048


def _limit_inputs(inputs: Any) -> Any:
    """Count the inputs before they are validated. A list of token ids is a single input."""
    is_list = isinstance(inputs, list) and not isinstance(next(iter(inputs), None), int)
    if is_list and len(inputs) > MAX_INPUTS:
        raise ValueError(f"takes at most {MAX_INPUTS} inputs, not {len(inputs)}")
    return inputs


class EmbeddingRequest(StrictModel):
    input: Annotated[PromptInput, BeforeValidator(_limit_inputs)]
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
    runtime = models.embedder(body.model)
    wanted = EmbedRequest(
        inputs=as_prompts(body.input),
        dimensions=body.dimensions,
        batch_size=body.batch_size,
        reuse=models.config.context_cache and body.use_kv_cache is not False,
        salt=caller_of(request).salt,
    )
    embedded = await while_connected(request, result_of(runtime, wanted, Embedded))
    content = await run_off_loop(request, _rendered, embedded, runtime.name, body.encoding_format)
    return Response(content, media_type="application/json")


def _rendered(embedded: Embedded, model: str, encoding_format: str | None) -> bytes:
    vectors = _base64(embedded) if encoding_format == "base64" else _floats(embedded)
    body = {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": vector}
            for index, vector in enumerate(vectors)
        ],
        "model": model,
        "usage": {
            "prompt_tokens": embedded.prompt_tokens,
            "total_tokens": embedded.prompt_tokens,
            "prompt_tokens_details": {"cached_tokens": embedded.reused_tokens},
        },
    }
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def _base64(embedded: Embedded) -> list[str]:
    size = 4 * embedded.dimensions  # bytes of its 32-bit floats
    view = memoryview(embedded.vectors)
    starts = range(0, len(view), size)
    return [b64encode(view[start : start + size]).decode() for start in starts]


def _floats(embedded: Embedded) -> Any:
    """Return a float32 array: its JSON is half as long as that of Python's floats."""
    import numpy as np  # slow to import, and most servers do not need it

    return np.frombuffer(embedded.vectors, "<f4").reshape(-1, embedded.dimensions)
