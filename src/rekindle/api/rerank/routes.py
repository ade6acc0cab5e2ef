"""Serves /v1/rerank, as clients of Jina, Cohere, llama.cpp and Hugging Face know it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BeforeValidator, Field, model_validator
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
from rekindle.errors import BadRequest
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


Texts = Annotated[
    list[str],
    Field(min_length=1, fail_fast=True),
    takes("a list of at least one string"),
    BeforeValidator(_limit_texts),
    at_most(MAX_INPUTS, "texts"),
]


class RerankRequest(StrictModel):
    """Takes `documents`, or `texts` in the form of text-embeddings-inference, whose answer is a
    plain list."""

    model: str | None = None
    query: Text
    documents: Documents | None = None
    texts: Texts | None = Field(None, description="Hugging Face: the documents")
    top_n: Count | None = Field(None, description="Return only this many of the best documents")
    return_documents: bool | None = Field(None, description="Return the text of each document")
    return_text: bool | None = Field(None, description="Hugging Face: return each text")
    use_kv_cache: bool | None = Field(None, description="False: compute every score again")

    @model_validator(mode="after")
    def _one_list(self) -> RerankRequest:
        if (self.documents is None) == (self.texts is None):
            name = "documents" if self.documents is None else "texts"
            raise BadRequest("Send one of `documents` and `texts`.", param=name)
        return self

    @property
    def ranked_texts(self) -> list[str]:
        documents = self.texts or self.documents or []
        return [each if isinstance(each, str) else each.text for each in documents]


@router.post("/v1/rerank")
async def rerank(body: RerankRequest, request: Request) -> Response:
    """Score how well each document answers the query, from 0 to 1, best first."""
    models = models_of(request)
    runtime = await loaded(request, models.ranker(body.model))
    wanted = RankRequest(
        query=body.query,
        documents=body.ranked_texts,
        reuse=models.config.context_cache and body.use_kv_cache is not False,
        salt=caller_of(request).salt,
    )
    ranked = await while_connected(request, result_of(runtime, wanted, Ranked))
    places = sorted(range(len(ranked.scores)), key=lambda place: -ranked.scores[place])
    places = places[: body.top_n]
    if body.texts is not None:
        return JsonResponse([_ranked_text(place, ranked, body) for place in places])
    return JsonResponse(_answer(ranked, body, runtime.name, places))


def _ranked_text(place: int, ranked: Ranked, body: RerankRequest) -> dict[str, Any]:
    text = {"text": body.ranked_texts[place]} if body.return_text else {}
    return {"index": place, "score": ranked.scores[place], **text}


def _answer(
    ranked: Ranked, body: RerankRequest, model: str, places: Sequence[int]
) -> dict[str, Any]:
    texts = body.ranked_texts
    return {
        "object": "list",
        "model": model,
        "results": [
            {
                "index": place,
                "relevance_score": ranked.scores[place],
                **({"document": {"text": texts[place]}} if body.return_documents else {}),
            }
            for place in places
        ],
        "usage": embedder_usage(ranked),
    }
