"""GET /api/version, /api/tags and /api/ps, POST /api/show: which models there are."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from blake3 import blake3
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rekindle.api.ollama.errors import OllamaErrorBody
from rekindle.api.ollama.names import LATEST, bare
from rekindle.api.ollama.schema import ModelRequest
from rekindle.protocol.frames import Ready
from rekindle.protocol.media import IMAGE
from rekindle.server.json_route import JsonRoute
from rekindle.server.models import models_of
from rekindle.server.responses import JsonResponse, documented
from rekindle.server.runtime_client import RuntimeClient

VERSION = "0.30.0"  # of Ollama, whose API this is: clients ask for a least one
NEVER = "9999-12-31T23:59:59Z"  # when a model is unloaded
UNITS = ((10**9, "B"), (10**6, "M"), (10**3, "K"))

router = APIRouter(
    route_class=JsonRoute, tags=["ollama"], responses=documented(400, model=OllamaErrorBody)
)


@router.get("/api/version")
async def version() -> Response:
    """The version of Ollama whose API this is."""
    return JsonResponse({"version": VERSION})


@router.get("/api/tags")
async def tags(request: Request) -> Response:
    """The models this server answers with."""
    return JsonResponse({"models": [_model(runtime) for runtime in models_of(request).all]})


@router.get("/api/ps")
async def running(request: Request) -> Response:
    """The same: all of them are loaded, and stay so."""
    models = [
        {
            **_model(runtime),
            "expires_at": NEVER,
            "size_vram": 0,
            "context_length": runtime.ready.context_tokens,
        }
        for runtime in models_of(request).all
        if runtime.ready is not None
    ]
    return JsonResponse({"models": models})


@router.post("/api/show")
async def show(body: ModelRequest, request: Request) -> Response:
    """What one of them is like."""
    models = models_of(request)
    runtime = models.any(bare(body.named, models))
    ready = runtime.loaded
    architecture = ready.architecture or "unknown"
    return JsonResponse(
        {
            "modelfile": f"FROM {runtime.name}\n",
            "parameters": "",
            "template": ready.chat_template or "",
            "details": _details(runtime),
            "model_info": {
                "general.architecture": architecture,
                "general.parameter_count": ready.parameters,
                f"{architecture}.context_length": ready.context_tokens,
                f"{architecture}.embedding_length": ready.dimensions or None,
            },
            "capabilities": _capabilities(ready),
            "modified_at": _time(runtime.file.modified_s),
        }
    )


def _model(runtime: RuntimeClient) -> dict[str, Any]:
    file = runtime.file
    tagged = runtime.name if ":" in runtime.name else f"{runtime.name}{LATEST}"
    identity = f"{runtime.name} {file.size_bytes} {file.modified_s}"
    return {
        "name": tagged,
        "model": tagged,
        "modified_at": _time(file.modified_s),
        "size": file.size_bytes,
        "digest": blake3(identity.encode()).hexdigest(),  # changes with the file
        "details": _details(runtime),
    }


def _details(runtime: RuntimeClient) -> dict[str, Any]:
    ready = runtime.ready
    family = ready.architecture if ready else ""
    return {
        "parent_model": "",
        "format": runtime.file.format,
        "family": family,
        "families": [family],
        "parameter_size": _size(ready.parameters) if ready else "",
        "quantization_level": ready.quantization if ready else "",
    }


def _capabilities(ready: Ready) -> list[str]:
    if ready.dimensions:
        return ["embedding"]
    able = ["completion"]
    if ready.chat_template is not None:
        able.append("tools")  # they are asked for in words where the template has no place for them
    if IMAGE in ready.modalities:
        able.append("vision")
    if ready.reasons:
        able.append("thinking")
    return able


def _size(parameters: int) -> str:
    for unit, letter in UNITS:
        if parameters >= unit:
            return f"{parameters / unit:.1f}{letter}"
    return str(parameters)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
