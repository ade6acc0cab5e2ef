"""The models that are served and their names; whether the settings agree with each other."""

from __future__ import annotations

from pathlib import Path

from rekindle.config import Config, Preset
from rekindle.errors import ConfigError
from rekindle.models.catalogue import DEFAULT_MODEL
from rekindle.server.auth import LOOPBACK
from rekindle.server.presets import described_tools


def check_settings(config: Config) -> None:
    """Refuse settings that contradict each other, before anything is opened or fetched."""
    keyed = bool(config.api_key or config.admin_key or config.api_keys_file)
    if config.host not in LOOPBACK and not keyed and not config.no_auth:
        raise ConfigError(
            f"listening on {config.host} without an API key would let anybody on the network in: "
            "give --api-key KEY, or say --no-auth if that is what you want"
        )
    preset_models(config)
    for name, preset in config.projects.items():
        described_tools(name, preset)
        if keyed and preset.cache.warm_on_startup and not preset.shared:
            raise ConfigError(
                f"project {name} would belong to nobody, because each API key has a cache of its "
                "own: say `shared: true` in the project to prepare it for all of them"
            )


def served_names(config: Config) -> dict[str, str]:
    """What `--model` named, by what clients call it, in the order given."""
    named: dict[str, str] = {}
    for name in config.model or (DEFAULT_MODEL,):
        served = _served_name(name)
        if named.setdefault(served, name) != name:
            raise ConfigError(
                f"{named[served]} and {name} would both be called {served}: rename one of the files"
            )
    return named


def _served_name(name: str) -> str:
    """The name as given, or the stem of a file."""
    path = Path(name)
    return path.stem if path.suffix == ".gguf" and path.exists() else name


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
