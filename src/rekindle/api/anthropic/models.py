"""GET /v1/models in Anthropic's shape, and GET /api/hello."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from rekindle.api.anthropic.errors import VERSION
from rekindle.server.models import models_of
from rekindle.server.responses import JsonResponse
from rekindle.server.runtime_client import RuntimeClient


class VersionedRoute(APIRoute):
    """A route for requests that say which version of Anthropic's API they are written for; all
    others go on to the next route of this path."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if scope["type"] == "http" and VERSION not in Headers(scope=scope):
            return Match.NONE, {}
        return super().matches(scope)


router = APIRouter(include_in_schema=False)
versioned = APIRouter(route_class=VersionedRoute, include_in_schema=False)


@versioned.get("/v1/models")
async def list_models(request: Request) -> Response:
    """The models that answer /v1/messages."""
    models = models_of(request)
    data = [_model(runtime, models.started_at) for runtime in models.runtimes]
    ids = [each["id"] for each in data]
    page = {"has_more": False, "first_id": ids[0], "last_id": ids[-1]}
    return JsonResponse({"data": data, **page})


@versioned.get("/v1/models/{model:path}")
async def retrieve_model(model: str, request: Request) -> Response:
    """One of them."""
    if not model:
        return await list_models(request)
    models = models_of(request)
    return JsonResponse(_model(models.runtime(model), models.started_at))


@router.get("/api/hello")
async def hello() -> Response:
    """Claude Code asks this first, whether anybody is there."""
    return JsonResponse({"message": "hello"})


router.include_router(versioned)


def _model(runtime: RuntimeClient, created_at: int) -> dict[str, Any]:
    context_tokens = runtime.ready.context_tokens if runtime.ready else None
    return {
        "type": "model",
        "id": runtime.name,
        "display_name": runtime.name,
        "created_at": datetime.fromtimestamp(created_at, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": context_tokens,
        "max_tokens": context_tokens,
    }
