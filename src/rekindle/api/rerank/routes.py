"""Serves /v1/rerank, as Jina's, Cohere's and llama.cpp's clients know it."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import Response

from rekindle.api.base.fields import (
    MAX_INPUTS,
    Count,
    StrictModel,
    Text,
    at_most,
    limit_text,
    takes,
)
from rekindle.api.base.loading import loaded
from rekindle.api.base.models import models_of
from rekindle.api.base.reply import embedder_usage, result_of
from rekindle.http.auth import caller_of
from rekindle.http.body import JsonRoute
from rekindle.http.responses import JsonResponse, while_connected
from rekindle.protocol.events import Ranked
from rekindle.protocol.requests import RankRequest

router = APIRouter(route_class=JsonRoute, tags=["rerank"])


def _limit_texts(documents: Any) -> Any:
    if isinstance(documents, list):
        limit_text([each.get("text") if isinstance(each, dict) else each for each in documents])
    return documents


class Document(StrictModel):
    text: str


Documents = Annotated[
    list[str | Document],
    Field(min_length=1, fail_fast=True),
    takes("a list of at least one string, or object with a `text`"),
    BeforeValidator(_limit_texts),
    at_most(MAX_INPUTS, "documents"),
]


class RerankRequest(StrictModel):
    model: str | None = None
    query: Text
    documents: Documents
    top_n: Count | None = Field(None, description="Return only this many of the best documents")
    return_documents: bool | None = Field(None, description="Return the text of each document")
    use_kv_cache: bool | None = Field(None, description="False: compute every score again")

    @property
    def texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]


@router.post("/v1/rerank")
async def rerank(body: RerankRequest, request: Request) -> Response:
    """Score how well each document answers the query, from 0 to 1, best first."""
    models = models_of(request)
    runtime = await loaded(request, models.ranker(body.model))
    wanted = RankRequest(
        query=body.query,
        documents=body.texts,
        reuse=models.config.context_cache and body.use_kv_cache is not False,
        salt=caller_of(request).salt,
    )
    ranked = await while_connected(request, result_of(runtime, wanted, Ranked))
    return JsonResponse(_answer(ranked, body, runtime.name))


def _answer(ranked: Ranked, body: RerankRequest, model: str) -> dict[str, Any]:
    places = sorted(range(len(ranked.scores)), key=lambda place: -ranked.scores[place])
    texts = body.texts
    return {
        "object": "list",
        "model": model,
        "results": [
            {
                "index": place,
                "relevance_score": ranked.scores[place],
                **({"document": {"text": texts[place]}} if body.return_documents else {}),
            }
            for place in places[: body.top_n]
        ],
        "usage": embedder_usage(ranked),
    }
