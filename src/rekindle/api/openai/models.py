"""GET /v1/models and GET /health."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rekindle.server.responses import RETRY_SOON, JsonResponse
from rekindle.server.service import Service

router = APIRouter(tags=["models"])


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """The models this server answers with."""
    service: Service = request.state.service
    return JsonResponse({"object": "list", "data": service.models()})


@router.get("/v1/models/{model:path}")
async def retrieve_model(model: str, request: Request) -> Response:
    """One of them."""
    if not model:  # a slash at the end of the list's path
        return await list_models(request)
    service: Service = request.state.service
    name = service.runtime(model).name
    return JsonResponse(next(entry for entry in service.models() if entry["id"] == name))


@router.get("/health")
async def health(request: Request) -> Response:
    """200 once the startup model answers, 503 while it does not."""
    service: Service = request.state.service
    if service.is_ready():
        return JsonResponse({"status": "ok"})
    return JsonResponse({"status": "unavailable"}, status_code=503, headers=RETRY_SOON)
