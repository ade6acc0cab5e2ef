"""POST /v1/embeddings."""

from __future__ import annotations

from base64 import b64encode
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator
from starlette.requests import Request
from starlette.responses import Response

from rekindle.api.base.fields import MOST_TOKENS, WHOLE, PromptInput, as_prompts
from rekindle.api.base.models import models_of
from rekindle.api.base.turns import result_of, while_connected
from rekindle.http.auth import caller_of
from rekindle.http.body import JsonRoute, run_off_loop
from rekindle.protocol.embeddings import Embedded, EmbedRequest

router = APIRouter(route_class=JsonRoute, tags=["embeddings"])

MOST_INPUTS = 2048
FLOAT_BYTES = 4


def _few(inputs: Any) -> Any:
    """Counted before they are checked, which takes its time for each."""
    is_list = isinstance(inputs, list) and not isinstance(next(iter(inputs), None), int)
    if is_list and len(inputs) > MOST_INPUTS:
        raise ValueError(f"takes at most {MOST_INPUTS} inputs, not {len(inputs)}")
    return inputs


class EmbeddingRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    input: Annotated[PromptInput, BeforeValidator(_few)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=MOST_TOKENS), WHOLE] | None = Field(
        None, description="The first so many of a vector, made of length one again"
    )
    batch_size: Annotated[int, Field(ge=1, le=MOST_TOKENS), WHOLE] | None = Field(
        None, description="The most inputs that are computed at once"
    )
    user: str | None = None
    use_kv_cache: bool | None = Field(None, description="False: compute what is known, too")

    @field_validator("input")
    @classmethod
    def _some_inputs(cls, value: Any) -> Any:
        if value == [] or (isinstance(value, list) and [] in value):
            raise ValueError("takes at least one input, and of tokens at least one in each")
        return value


@router.post("/v1/embeddings")
async def create_embedding(body: EmbeddingRequest, request: Request) -> Response:
    """A vector of length one for each input, in their order; equal inputs are computed once."""
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
    size = embedded.dimensions * FLOAT_BYTES
    view = memoryview(embedded.vectors)
    starts = range(0, len(view), size)
    return [b64encode(view[start : start + size]).decode() for start in starts]


def _floats(embedded: Embedded) -> Any:
    """An array: JSON then has the shortest text of each f32, half of what its f64 would have."""
    import numpy as np  # slow to import, and most servers do without it

    return np.frombuffer(embedded.vectors, "<f4").reshape(-1, embedded.dimensions)
