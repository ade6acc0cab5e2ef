"""GET /props, by which tools of llama.cpp's server learn what the model is like."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rekindle.api.fields import NO_LIMIT
from rekindle.config import Config
from rekindle.protocol.media import IMAGE
from rekindle.server.models import ModelNumber, models_of
from rekindle.server.responses import JsonResponse
from rekindle.server.runtime_client import RuntimeClient
from rekindle.version import __version__

router = APIRouter(tags=["llama.cpp"])


@router.get("/props")
async def props(request: Request, model: str | None = None, number: ModelNumber = None) -> Response:
    """What the model is like: its context, its chat template, what it can see."""
    models = models_of(request)
    return JsonResponse(_props(models.runtime(model, number), models.config))


def _props(runtime: RuntimeClient, config: Config) -> dict[str, Any]:
    ready = runtime.loaded
    return {
        "default_generation_settings": {
            "n_ctx": ready.context_tokens,
            "params": {
                "temperature": config.temperature,
                "top_p": config.top_p,
                "repeat_penalty": config.repetition_penalty,
                "repeat_last_n": config.repetition_context_size,
                "n_predict": NO_LIMIT if config.max_tokens is None else config.max_tokens,
            },
        },
        "total_slots": config.parallel,
        "model_alias": runtime.name,
        "modalities": {"vision": IMAGE in ready.modalities, "audio": False},
        "chat_template": ready.chat_template or "",
        "bos_token": ready.bos,
        "eos_token": ready.eos,
        "build_info": f"rekindle-{__version__}",
    }
