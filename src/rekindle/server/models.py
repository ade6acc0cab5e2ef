"""The served models: their names, the presets that use them, and the model that a request means."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

from fastapi import Header
from pydantic import TypeAdapter, ValidationError
from starlette.requests import Request

from rekindle.api.tools import Tool, Tools, described
from rekindle.config import Config, Preset
from rekindle.errors import BadRequest, ConfigError, ModelNotFound
from rekindle.models.catalogue import DEFAULT_MODEL, DEFAULT_VISION_MODEL
from rekindle.server.runtime_client import RuntimeClient

DEFAULT = "default"
ModelNumber = Annotated[
    str | None,
    Header(alias="X-Model-Id", description="The number of a loaded model, counted from 0."),
]

_tools: TypeAdapter[list[Tool]] = TypeAdapter(Tools)


class ServedModels:
    """The loaded models and their settings; the first answers when a request names none."""

    def __init__(self, config: Config, runtimes: list[RuntimeClient]) -> None:
        self.config = config
        self._runtimes = {runtime.name: runtime for runtime in runtimes}
        self._default = runtimes[0]
        self.started_at = int(time.time())

    @property
    def runtimes(self) -> list[RuntimeClient]:
        """In the order of `--model`, which is how they are numbered."""
        return list(self._runtimes.values())

    def runtime(self, model: str | None, number: str | None = None) -> RuntimeClient:
        """The model of this name; without one, the model of this number."""
        numbered = self._default if number is None else self._numbered(number)
        if model in (None, "", DEFAULT):
            return numbered
        found = self._runtimes.get(model)
        if found is None:
            served = ", ".join(self._runtimes)
            raise ModelNotFound(
                f"The model {model[:128]!r} is not served here. Served: {served}. "
                "Leave `model` out for the first of them.",
                param="model",
            )
        return found

    def _numbered(self, number: str) -> RuntimeClient:
        loaded = {str(place): runtime for place, runtime in enumerate(self.runtimes)}
        if number not in loaded:
            names = ", ".join(f"{place} ({runtime.name})" for place, runtime in loaded.items())
            raise BadRequest(
                f"`X-Model-Id` takes the number of a loaded model: {names}.", param="X-Model-Id"
            )
        return loaded[number]

    def chosen(self, number: str | None) -> list[RuntimeClient]:
        """The model of this number alone; without one, all of them."""
        return self.runtimes if number is None else [self._numbered(number)]

    def others(self, runtime: RuntimeClient) -> list[RuntimeClient]:
        return [other for other in self.runtimes if other is not runtime]

    @property
    def problem(self) -> str | None:
        """Why not every model answers; None: all do."""
        down = (runtime.down_reason for runtime in self.runtimes if runtime.ready is None)
        return next(down, None)


def models_of(request: Request) -> ServedModels:
    """The models of the server that received this request."""
    models: ServedModels = request.state.models
    return models


def served_names(config: Config) -> dict[str, str]:
    """What `--model` named, by what clients call it, in the order given."""
    default = DEFAULT_VISION_MODEL if config.vlm and config.mmproj is None else DEFAULT_MODEL
    named: dict[str, str] = {}
    for name in config.model or (default,):
        served = _served_name(name)
        if named.setdefault(served, name) != name:
            raise ConfigError(
                f"{named[served]} and {name} would both be called {served}: rename one of the files"
            )
    return named


def _served_name(name: str) -> str:
    """The name as given, or the stem of a file."""
    path = Path(name)
    return path.stem if path.is_file() else name


def preset_models(config: Config) -> dict[str, str]:
    """What clients call each preset's model."""
    names = served_names(config)
    return {name: _model_of(name, preset, names) for name, preset in config.projects.items()}


def _model_of(name: str, preset: Preset, names: dict[str, str]) -> str:
    """The model may be written as clients call it, or as `--model` named it."""
    if preset.model is None:
        return next(iter(names))
    for served, given in names.items():
        if preset.model in (served, given):
            return served
    raise ConfigError(
        f"project {name} wants the model {preset.model}, which is not served: "
        f"give --model {preset.model} too, or choose one of {', '.join(names)}"
    )


def described_tools(name: str, preset: Preset) -> list[dict[str, Any]] | None:
    """The preset's tools as a chat template sees them, validated like those of a request."""
    try:
        return described(_tools.validate_python(preset.tools))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, (name, "tools", *first["loc"])))
        reason = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"`projects`, `{place}`: {reason}") from None
