"""GET /v1/models and GET /health."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rekindle.api.base.models import models_of
from rekindle.http.responses import RETRY_SOON, JsonResponse
from rekindle.worker.client import RuntimeClient

router = APIRouter(tags=["models"])


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """The models this server answers with."""
    models = models_of(request)
    listed = [_model(runtime, models.started_at) for runtime in models.all]
    return JsonResponse({"object": "list", "data": listed})


@router.get("/v1/models/{model:path}")
async def retrieve_model(model: str, request: Request) -> Response:
    """One of them."""
    if not model:  # a slash at the end of the list's path
        return await list_models(request)
    models = models_of(request)
    return JsonResponse(_model(models.any(model), models.started_at))


@router.get("/health")
async def health(request: Request) -> Response:
    """200 while all models answer; 503 with the reason while one is loading, gone or stuck, or the
    server is stopping."""
    problem = models_of(request).problem
    if problem is None:
        return JsonResponse({"status": "ok"})
    body = {"status": "unavailable", "reason": problem}
    return JsonResponse(body, status_code=503, headers=RETRY_SOON)


def _model(runtime: RuntimeClient, created_at: int) -> dict[str, Any]:
    ready = runtime.ready
    makes_vectors = ready is not None and ready.dimensions and not ready.ranks
    return {
        "id": runtime.name,
        "object": "model",
        "created": created_at,
        "owned_by": "rekindle",
        "modalities": list(ready.modalities) if ready else None,
        "max_model_len": ready.context_tokens if ready else None,
        "meta": {"n_ctx": ready.context_tokens, "n_vocab": ready.vocabulary} if ready else None,
        **({"dimensions": ready.dimensions} if ready and makes_vectors else {}),
    }
