"""Serves /v1/embeddings."""

from __future__ import annotations

from base64 import b64encode
from typing import Annotated, Literal

from fastapi import APIRouter
from pydantic import AfterValidator, BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import Response

from rekindle.api.base.fields import (
    Count,
    StrictModel,
    limit_inputs,
    limit_text,
    refuse_empty,
    takes,
)
from rekindle.api.base.loading import loaded
from rekindle.api.base.models import models_of
from rekindle.api.base.reply import VectorsResponse, embedder_usage, result_of, vectors
from rekindle.http.auth import caller_of
from rekindle.http.body import JsonRoute, run_off_loop_if_large
from rekindle.http.responses import while_connected
from rekindle.protocol.events import Embedded
from rekindle.protocol.requests import EmbedRequest

router = APIRouter(route_class=JsonRoute, tags=["embeddings"])


Mixed = Annotated[list[int | str], Field(fail_fast=True)]
Inputs = Annotated[
    str | Mixed | Annotated[list[str | Mixed], Field(fail_fast=True)],
    takes("a string, a list of strings, a list of token ids, or a list of such lists"),
    AfterValidator(refuse_empty),
    BeforeValidator(limit_text),
    BeforeValidator(limit_inputs),
]


class EmbeddingRequest(StrictModel):
    input: Inputs
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

    @property
    def inputs(self) -> list[str | list[int | str]]:
        """The inputs. A list with a token id among its items is a single input."""
        given = self.input
        is_one = isinstance(given, str) or any(isinstance(each, int) for each in given)
        return [given] if is_one else list(given)  # type: ignore[list-item,arg-type]


@router.post("/v1/embeddings")
async def create_embedding(body: EmbeddingRequest, request: Request) -> Response:
    """Compute a normalised vector for each input. Equal inputs are computed once."""
    models = models_of(request)
    runtime = await loaded(request, models.embedder(body.model))
    wanted = EmbedRequest(
        inputs=body.inputs,
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
