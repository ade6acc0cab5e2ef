"""Who is served under which name: models, and the projects that want them."""

from __future__ import annotations

from pathlib import Path

from rekindle.config import Config
from rekindle.errors import ConfigError
from rekindle.models.catalogue import DEFAULT_MODEL
from rekindle.server.auth import LOOPBACK
from rekindle.server.presets import Project


def refuse_contradictions(config: Config) -> None:
    """What is wrong with the settings together, before anything is opened or fetched."""
    keyed = bool(config.api_key or config.admin_key or config.api_keys_file)
    if config.host not in LOOPBACK and not keyed and not config.no_auth:
        raise ConfigError(
            f"listening on {config.host} without an API key would let anybody on the network in: "
            "give --api-key KEY, or say --no-auth if that is what you want"
        )
    project_models(config)
    for name, project in config.projects.items():
        if keyed and project.cache.warm_on_startup and not project.shared:
            raise ConfigError(
                f"project {name} would belong to nobody, because each API key has a cache of its "
                "own: say `shared: true` in the project to prepare it for all of them"
            )


def served_names(config: Config) -> dict[str, str]:
    """The models by what clients call them, in the order they were asked for."""
    named: dict[str, str] = {}
    for name in config.model or (DEFAULT_MODEL,):
        served = _served_name(name)
        if named.setdefault(served, name) != name:
            raise ConfigError(
                f"{named[served]} and {name} would both be called {served}: rename one of the files"
            )
    return named


def _served_name(name: str) -> str:
    """The name it was asked for by, or its file's stem."""
    path = Path(name)
    return path.stem if path.suffix == ".gguf" and path.exists() else name


def project_models(config: Config) -> dict[str, str]:
    """What clients call each project's model."""
    names = served_names(config)
    return {name: _model_of(name, each, names) for name, each in config.projects.items()}


def _model_of(name: str, project: Project, names: dict[str, str]) -> str:
    """It may be written as clients call it, or as it was asked for."""
    if project.model is None:
        return next(iter(names))
    for served, asked in names.items():
        if project.model in (served, asked):
            return served
    raise ConfigError(
        f"project {name} wants the model {project.model}, which is not served: "
        f"give --model {project.model} too, or choose one of {', '.join(names)}"
    )
