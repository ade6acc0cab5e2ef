"""Resolves the model that a request or a preset names."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

from fastapi import Header
from pydantic import TypeAdapter, ValidationError
from starlette.requests import Request

from rekindle.api.base.tools import Tool, Tools, described
from rekindle.config import Config, Preset
from rekindle.errors import BadRequest, ConfigError, ModelNotFound, Unsupported
from rekindle.http.limits import permitted
from rekindle.models.catalogue import CATALOGUE, DEFAULT_MODEL, DEFAULT_VISION_MODEL
from rekindle.models.folder import is_model_folder
from rekindle.worker.client import RuntimeClient

DEFAULT = "default"
ModelNumber = Annotated[
    str | None,
    Header(alias="X-Model-Id", description="The number of a loaded model, counted from 0."),
]

_tools: TypeAdapter[list[Tool]] = TypeAdapter(Tools)


class ServedModels:
    """The loaded models and their settings. The first of a kind is the default."""

    def __init__(
        self,
        config: Config,
        runtimes: list[RuntimeClient],
        embedders: Sequence[RuntimeClient] = (),
    ) -> None:
        """`runtimes` generate text; `embedders` compute embeddings or scores."""
        self.config = config
        self._runtimes = {runtime.name: runtime for runtime in runtimes}
        self._embedders = {runtime.name: runtime for runtime in embedders}
        self._rankers = {each.name for each in embedders if each.ready and each.ready.ranks}
        self._default = runtimes[0]
        self._configs = {
            served: _with_defaults_of(name, config) for served, name in served_names(config).items()
        }
        self._aliases = alias_models(config)
        self.started_at = int(time.time())

    @property
    def runtimes(self) -> list[RuntimeClient]:
        """The models that generate text, in the order of `--model`, which numbers them."""
        return list(self._runtimes.values())

    @property
    def all(self) -> list[RuntimeClient]:
        """All models, including those for embeddings and ranking."""
        return [*self._runtimes.values(), *self._embedders.values()]

    def runtime(self, model: str | None, number: str | None = None) -> RuntimeClient:
        """Find a text model by name, by number, or by both if they agree."""
        numbered = self._usable_default() if number is None else self._numbered(number)
        model = self._resolved(model, self._runtimes)
        if model in (None, "", DEFAULT):
            return _named(numbered.name, self._runtimes)
        if model in self._embedders:
            endpoint = "/v1/rerank" if model in self._rankers else "/v1/embeddings"
            raise BadRequest(
                f"The model {model!r} generates no text: use {endpoint}, or one of "
                f"{', '.join(self._runtimes)}.",
                param="model",
            )
        return _agreed(_named(model, self._runtimes), numbered, number)

    def _usable_default(self) -> RuntimeClient:
        """The first model, or the first that the key of this request may use."""
        return next(iter(permitted(self._runtimes).values()), self._default)

    def any(self, model: str | None, number: str | None = None) -> RuntimeClient:
        """Find a model of any kind by name, or a text model by number."""
        other = permitted(self._embedders).get(self._resolved(model, self._runtimes) or "")
        if other is None:
            return self.runtime(model, number)
        return other if number is None else _agreed(other, self._numbered(number), number)

    def embedder(self, model: str | None) -> RuntimeClient:
        names = [name for name in self._embedders if name not in self._rankers]
        return self._of_kind(model, names, "makes embeddings", "--embedding-model")

    def ranker(self, model: str | None) -> RuntimeClient:
        names = [name for name in self._embedders if name in self._rankers]
        return self._of_kind(model, names, "ranks documents", "--embedding-model with a reranker")

    def _of_kind(
        self, model: str | None, names: Sequence[str], what: str, flag: str
    ) -> RuntimeClient:
        usable = permitted(self._embedders)
        if names:
            names = [name for name in names if name in usable]
        if not names:
            raise Unsupported(f"No model here {what}: start the server with {flag}.", param="model")
        model = self._resolved(model, names)
        if model in (None, "", DEFAULT):
            return self._embedders[names[0]]
        if model in names:
            return self._embedders[model]
        found = _named(model, {each.name: each for each in self.all})
        raise BadRequest(
            f"The model {found.name!r} is not one that {what}: use one of {', '.join(names)}.",
            param="model",
        )

    def knows(self, model: str) -> bool:
        """Whether a model is served under this name, or under an alias that matches it."""
        return any(model == each.name for each in self.all) or self._alias(model) is not None

    def aliases_of(self, runtime: RuntimeClient) -> list[str]:
        """The other names of a model, without patterns."""
        return [
            name
            for name, model in self._aliases.items()
            if model == runtime.name and "*" not in name
        ]

    def _alias(self, model: str) -> str | None:
        """The served model for which a name stands. An exact alias wins over a pattern."""
        exact = self._aliases.get(model)
        matching = (served for name, served in self._aliases.items() if fnmatchcase(model, name))
        return exact or next(matching, None)

    def _resolved(self, model: str | None, served: Collection[str]) -> str | None:
        """The name of the model that a request means, among `served` ones of the wanted kind."""
        if not model or any(model == each.name for each in self.all):
            return model
        any_name = next(iter(served)) if self.config.any_model_name and len(served) == 1 else model
        return self._alias(model) or any_name

    def config_of(self, runtime: RuntimeClient) -> Config:
        """The settings with the model's own request defaults where the operator set none."""
        return self._configs.get(runtime.name, self.config)

    def _numbered(self, number: str) -> RuntimeClient:
        loaded = {str(place): runtime for place, runtime in enumerate(self.runtimes)}
        if number not in loaded:
            names = ", ".join(f"{place} ({runtime.name})" for place, runtime in loaded.items())
            raise BadRequest(
                f"`X-Model-Id` takes the number of a loaded model: {names}.", param="X-Model-Id"
            )
        return loaded[number]

    def chosen(self, number: str | None) -> list[RuntimeClient]:
        """The text model of this number, or all of them if there is no number."""
        return self.runtimes if number is None else [self._numbered(number)]

    def others(self, runtime: RuntimeClient) -> list[RuntimeClient]:
        return [other for other in self.runtimes if other is not runtime]

    @property
    def problem(self) -> str | None:
        """Why a model does not answer, or None if all do."""
        down = (runtime.supervisor.down_reason for runtime in self.all if runtime.ready is None)
        return next(down, None)


def _named(model: str, served: Mapping[str, RuntimeClient]) -> RuntimeClient:
    usable = permitted(served)
    found = usable.get(model)
    if found is None:
        raise ModelNotFound(
            f"The model {model[:128]!r} is not served here. Served: {', '.join(usable)}. "
            "Leave `model` out for the first of them.",
            param="model",
        )
    return found


def _agreed(named: RuntimeClient, numbered: RuntimeClient, number: str | None) -> RuntimeClient:
    """Return the named model, or raise BadRequest if a number was sent that means another one."""
    if number is not None and named is not numbered:
        raise BadRequest(
            f"`model` is {named.name!r}, but `X-Model-Id: {number}` is {numbered.name!r}: send "
            "only one of them, or the same model in both.",
            param="model",
        )
    return named


def models_of(request: Request) -> ServedModels:
    models: ServedModels = request.state.models
    return models


def served_embedders(config: Config) -> dict[str, str]:
    """The models of `--embedding-model`, in order, keyed by the name that clients use."""
    return _by_served_name(config.embedding_model, taken=served_names(config))


def served_names(config: Config) -> dict[str, str]:
    """The models of `--model`, in order, keyed by the name that clients use."""
    default = DEFAULT_VISION_MODEL if config.vlm and config.mmproj is None else DEFAULT_MODEL
    return _by_served_name(config.model or (default,))


def _with_defaults_of(name: str, config: Config) -> Config:
    """Fill in the defaults of a catalogue model. A setting that the operator gave wins."""
    if name not in CATALOGUE:
        return config
    defaults = dataclasses.asdict(CATALOGUE[name].defaults)
    filled = {
        setting: value
        for setting, value in defaults.items()
        if value is not None and setting not in config.given
    }
    return dataclasses.replace(config, **filled)


def _by_served_name(names: Sequence[str], taken: Mapping[str, str] = {}) -> dict[str, str]:
    named: dict[str, str] = {}
    for name in names:
        served = _served_name(name)
        other = taken.get(served) or named.setdefault(served, name)
        if other != name or served in taken:
            raise ConfigError(
                f"{other} and {name} would both be called {served}: rename one of the files"
            )
    return named


def _served_name(name: str) -> str:
    """The stem of a file, the name of a folder, or the name as given."""
    path = Path(name)
    if path.is_file():
        return path.stem
    return path.resolve().name if is_model_folder(path) else name


def alias_models(config: Config) -> dict[str, str]:
    """The served model of each alias, which may name it as clients do, or as `--model` does."""
    served = {**served_names(config), **served_embedders(config)}
    if config.any_model_name and len(served_names(config)) > 1:
        raise ConfigError(
            "`--any-model-name` is for a server with one model: give one --model, or list the "
            "names of each model under `aliases` in rekindle.yaml"
        )
    return {alias: _aliased(alias, model, served) for alias, model in config.aliases.items()}


def _aliased(alias: str, model: str, served: Mapping[str, str]) -> str:
    for name, given in served.items():
        if model in (name, given):
            return name
    raise ConfigError(
        f"the alias {alias} stands for the model {model}, which is not served: give --model "
        f"{model} too, or choose one of {', '.join(served)}"
    )


def preset_models(config: Config) -> dict[str, str]:
    """The served model of each preset."""
    names = served_names(config)
    return {name: _model_of(name, preset, names) for name, preset in config.projects.items()}


def _model_of(name: str, preset: Preset, names: dict[str, str]) -> str:
    """A preset may name a model as clients do, or as `--model` does."""
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
    """A preset's tools as the chat template reads them, validated like those of a request."""
    try:
        return described(_tools.validate_python(preset.tools))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, (name, "tools", *first["loc"])))
        reason = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"`projects`, `{place}`: {reason}") from None
