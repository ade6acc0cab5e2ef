"""Acts on Ollama's `keep_alive`: how long a model stays loaded after a request."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime, timedelta

from rekindle.api.base.models import ServedModels
from rekindle.worker.client import RuntimeClient
from rekindle.worker.pool import FOREVER, ModelBusy

NEVER = "9999-12-31T23:59:59Z"


def is_ignored(models: ServedModels, runtime: RuntimeClient, keep_alive: float | None) -> bool:
    """Whether the field changes nothing, because the operator keeps the model loaded."""
    return keep_alive is not None and models.pool.model(runtime).policy.keep_loaded


def set_keep_alive(models: ServedModels, runtime: RuntimeClient, keep_alive: float | None) -> None:
    if keep_alive is not None:
        models.pool.keep_alive(runtime, FOREVER if keep_alive < 0 else keep_alive)


async def unload(models: ServedModels, runtime: RuntimeClient) -> None:
    """Unload a model now, or when the requests that it answers have ended. A model that the
    operator keeps loaded stays."""
    model = models.pool.model(runtime)
    if model.policy.keep_loaded:
        return
    models.pool.keep_alive(runtime, 0)
    with contextlib.suppress(ModelBusy):
        if model.is_loaded:
            await models.pool.unload(runtime)


def expires_at(models: ServedModels, runtime: RuntimeClient) -> str:
    """When the model will be unloaded if no request comes."""
    model = models.pool.model(runtime)
    if model.idle_limit_s is None:
        return NEVER
    idle_s = 0.0 if not model.is_idle else models.pool.clock() - model.last_used_s
    try:
        expires = datetime.now(UTC) + timedelta(seconds=max(model.idle_limit_s - idle_s, 0))
    except OverflowError:
        return NEVER
    return expires.isoformat().replace("+00:00", "Z")
