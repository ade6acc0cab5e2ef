"""Resolves the model that a request or a preset names."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any

from fastapi import Header
from pydantic import TypeAdapter, ValidationError
from starlette.requests import Request

from rekindle.api.base.specs import ModelSpec, model_specs, served_names, with_idle_limit
from rekindle.api.base.tools import Tool, Tools, described
from rekindle.config import Config, Preset
from rekindle.errors import BadRequest, ConfigError, ModelError, ModelNotFound, Unsupported
from rekindle.http.limits import permitted
from rekindle.models.catalogue import CATALOGUE
from rekindle.worker.client import RuntimeClient
from rekindle.worker.pool import LoadPolicy, ModelPool, PreparedLoad

DEFAULT = "default"
ModelNumber = Annotated[
    str | None,
    Header(alias="X-Model-Id", description="The number of a model, counted from 0."),
]

_tools: TypeAdapter[list[Tool]] = TypeAdapter(Tools)


class ServedModels:
    """The models and their settings, loaded or not. The first of a kind is the default."""

    def __init__(
        self,
        config: Config,
        runtimes: list[RuntimeClient],
        embedders: Sequence[RuntimeClient] = (),
        *,
        pool: ModelPool | None = None,
        specs: Mapping[str, ModelSpec] | None = None,
        offer: Callable[[ModelSpec], RuntimeClient] | None = None,
    ) -> None:
        """`runtimes` generate text; `embedders` compute embeddings or scores. Without a pool, they
        are loaded and stay so. `offer` adds a model to the pool."""
        self.config = config
        self._runtimes = {runtime.name: runtime for runtime in runtimes}
        self._embedders = {runtime.name: runtime for runtime in embedders}
        self._numbered_names = [runtime.name for runtime in runtimes]  # never shrinks
        self.pool = pool or _fixed_pool([*runtimes, *embedders])
        self._specs = dict(model_specs(config) if specs is None else specs)
        self._configs = {
            name: _with_defaults_of(spec, config) for name, spec in self._specs.items()
        }
        self._aliases = alias_models(config)
        self._offer = offer
        self.started_at = int(time.time())

    def add(self, spec: ModelSpec) -> None:
        """Offer one more model, to be loaded on request. The others keep their numbers."""
        self.check_on_demand()
        assert self._offer is not None
        spec = with_idle_limit(spec, self.config)
        runtime = self._offer(spec)
        self._specs[spec.name] = spec
        self._configs[spec.name] = _with_defaults_of(spec, self.config)
        if spec.kind == "text":
            self._runtimes[spec.name] = runtime
            if spec.name not in self._numbered_names:
                self._numbered_names.append(spec.name)
        else:
            self._embedders[spec.name] = runtime

    def check_on_demand(self) -> None:
        if self._offer is None or not self.config.loads_on_demand:
            raise Unsupported(
                "This server loads its models when it starts: start it with --models-dir, or list "
                "them under `models` in rekindle.yaml."
            )

    def is_removable(self, spec: ModelSpec) -> bool:
        """Whether a request may delete the model, because no setting names it."""
        base = spec.name.partition(":")[0]
        return not (spec.at_start or spec.adapter or {spec.name, base} & self.config.models.keys())

    async def remove(self, name: str) -> None:
        """Unload a model and offer it no longer. Its number stays unused. Raises ModelBusy."""
        runtime = next(each for each in self.all if each.name == name)
        await self.pool.remove(runtime)
        for models in (self._runtimes, self._embedders, self._specs, self._configs):
            models.pop(name, None)

    @property
    def _default(self) -> RuntimeClient:
        found = next(iter(self._runtimes.values()), None)
        if found is None:
            raise ModelNotFound("This server offers no model any more: pull or create one.")
        return found

    @property
    def _rankers(self) -> list[str]:
        return [name for name, each in self._embedders.items() if self._ranks(each)]

    def _ranks(self, runtime: RuntimeClient) -> bool:
        """Its files tell before it is first loaded."""
        if runtime.described is not None:
            return runtime.described.ranks
        spec = self._specs.get(runtime.name)
        return spec is not None and spec.kind == "rerank"

    def spec_of(self, runtime: RuntimeClient) -> ModelSpec | None:
        return self._specs.get(runtime.name)

    def system_of(self, runtime: RuntimeClient) -> str | None:
        """The system prompt of conversations that have none."""
        spec = self.spec_of(runtime)
        return spec.system if spec else None

    @property
    def runtimes(self) -> list[RuntimeClient]:
        """The models that generate text, in the order of the settings."""
        return list(self._runtimes.values())

    @property
    def loaded_runtimes(self) -> list[RuntimeClient]:
        """The models that generate text and were loaded. One of them may be restarting."""
        return [each for each in self.runtimes if self.pool.model(each).is_usable]

    @property
    def all_loaded(self) -> list[RuntimeClient]:
        return [each for each in self.all if self.pool.model(each).is_usable]

    def number_of(self, runtime: RuntimeClient) -> int | None:
        """The number of a text model for `X-Model-Id`."""
        names = self._numbered_names
        return names.index(runtime.name) if runtime.name in names else None

    def is_embedder(self, runtime: RuntimeClient) -> bool:
        return runtime.name in self._embedders

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
        numbered = {
            str(place): self._runtimes[name]
            for place, name in enumerate(self._numbered_names)
            if name in self._runtimes
        }
        if number not in numbered:
            names = ", ".join(f"{place} ({runtime.name})" for place, runtime in numbered.items())
            raise BadRequest(
                f"`X-Model-Id` takes the number of a model: {names}.", param="X-Model-Id"
            )
        return numbered[number]

    def chosen(self, number: str | None) -> list[RuntimeClient]:
        """The text model of this number, or all loaded ones if there is no number."""
        return self.loaded_runtimes if number is None else [self._numbered(number)]

    def others(self, runtime: RuntimeClient) -> list[RuntimeClient]:
        return [other for other in self.loaded_runtimes if other is not runtime]

    @property
    def problem(self) -> str | None:
        """Why a model that was loaded does not answer, or None if all do."""
        down = (
            runtime.supervisor.down_reason
            for runtime in self.all
            if runtime.ready is None and self.pool.model(runtime).is_usable
        )
        return next(down, None)


def _fixed_pool(runtimes: Sequence[RuntimeClient]) -> ModelPool:
    """A pool of models that are loaded already, and stay so."""
    pool = ModelPool()
    for runtime in runtimes:
        pool.add(runtime, LoadPolicy(prepare=_never, keep_loaded=True), is_loaded=True)
    return pool


def _never() -> PreparedLoad:
    raise ModelError("this model is not loaded on request")


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


def _with_defaults_of(spec: ModelSpec, config: Config) -> Config:
    """Fill in the defaults of a model: those of its declaration, else those of the catalogue for
    settings that the operator did not give."""
    model = CATALOGUE.get(spec.source)
    defaults = dataclasses.asdict(model.defaults) if model else {}
    filled = {
        setting: value
        for setting, value in defaults.items()
        if value is not None and setting not in config.given
    }
    filled |= spec.parameters
    return dataclasses.replace(config, **filled) if filled else config


def alias_models(config: Config) -> dict[str, str]:
    """The served model of each alias, which may name it as clients do, or as `--model` does."""
    served = {name: spec.source for name, spec in model_specs(config).items()}
    if config.any_model_name and (len(served_names(config)) > 1 or config.loads_on_demand):
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
    specs = model_specs(config).values()
    names = {spec.name: spec.source for spec in specs if spec.kind == "text"}
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
