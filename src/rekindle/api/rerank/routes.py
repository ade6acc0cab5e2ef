"""POST /v1/rerank, in the shape that Jina's, Cohere's and llama.cpp's clients know."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from rekindle.api.base.fields import MOST_TOKENS, WHOLE, bounded_text, takes
from rekindle.api.base.models import models_of
from rekindle.api.base.turns import result_of, while_connected
from rekindle.http.auth import caller_of
from rekindle.http.body import JsonRoute
from rekindle.http.responses import JsonResponse
from rekindle.protocol.embeddings import Ranked, RankRequest

router = APIRouter(route_class=JsonRoute, tags=["rerank"])

MOST_DOCUMENTS = 2048


def _bounded(documents: Any) -> Any:
    """Counted before they are checked, which takes its time for each."""
    if isinstance(documents, list):
        if len(documents) > MOST_DOCUMENTS:
            raise ValueError(f"takes at most {MOST_DOCUMENTS} documents, not {len(documents)}")
        bounded_text([each.get("text") if isinstance(each, dict) else each for each in documents])
    return documents


class Document(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    text: str


Documents = Annotated[
    list[str | Document],
    Field(min_length=1, fail_fast=True),
    takes("a list of at least one string, or object with a `text`"),
    BeforeValidator(_bounded),
]


class RerankRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    model: str | None = None
    query: Annotated[str, BeforeValidator(bounded_text)]
    documents: Documents
    top_n: Annotated[int, Field(ge=1, le=MOST_TOKENS), WHOLE] | None = Field(
        None, description="The best so many alone"
    )
    return_documents: bool | None = Field(None, description="Each result with its document")
    use_kv_cache: bool | None = Field(None, description="False: compute what is known, too")

    @property
    def texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]


@router.post("/v1/rerank")
async def rerank(body: RerankRequest, request: Request) -> Response:
    """How well each document answers the query, from 0 to 1, the best first."""
    models = models_of(request)
    runtime = models.ranker(body.model)
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
        "usage": {
            "prompt_tokens": ranked.prompt_tokens,
            "total_tokens": ranked.prompt_tokens,
            "prompt_tokens_details": {"cached_tokens": ranked.reused_tokens},
        },
    }
