"""The names that Ollama's clients give to models."""

from __future__ import annotations

from rekindle.server.models import ServedModels
from rekindle.server.runtime_client import RuntimeClient

LATEST = ":latest"  # what clients add to a name without a tag


def bare(model: str | None, models: ServedModels) -> str | None:
    """The name as this server knows it."""
    if model is None or any(runtime.name == model for runtime in models.all):
        return model
    return model.removesuffix(LATEST)


def runtime_named(models: ServedModels, model: str | None) -> RuntimeClient:
    """The chat model of this name; raises ModelNotFound."""
    return models.runtime(bare(model, models))
