"""Merges the sources of settings: file, `MAX_KV_SIZE_GB`, `REKINDLE_*` and flags."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from rekindle.config.presets import Spell, unknown_setting
from rekindle.config.settings import SETTINGS, Config, Declaration
from rekindle.errors import ConfigError
from rekindle.protocol.settings import GB

FILE_NAME = "rekindle.yaml"
ENV_PREFIX = "REKINDLE_"
# Variables with this prefix that other modules read.
OTHER_VARIABLES = {"config", "engine_module"}
DISK_VARIABLE = "MAX_KV_SIZE_GB"
HIDDEN = "(hidden)"  # shown in place of a secret

_config = TypeAdapter(Config)


@dataclasses.dataclass(frozen=True, slots=True)
class SettingsSource:
    """The settings of one source, and how that source spells a name."""

    settings: Mapping[str, Any]
    spell: Spell
    file: Path | None = None

    def where(self, name: str) -> str:
        """Say where the value of a setting was given: a file, a variable or a flag."""
        return str(self.file) if self.file else self.spell(name).strip("`")


def as_flag(name: str) -> str:
    return f"`--{name.replace('_', '-')}`"


def load_config(
    flags: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
    file: Path | None = None,
    *,
    spell: Spell = as_flag,
) -> Config:
    """Merge the sources. Raises ConfigError, which names the setting and its source."""
    environment = os.environ if environment is None else environment
    file = file or _default_file(environment)
    sources = [
        _from_file(file),
        _from_disk_variable(environment),
        _from_environment(environment),
        _from_flags(flags, spell),
    ]
    merged: dict[str, Any] = {}
    given: dict[str, str] = {}
    for source in sources:
        for name, value in source.settings.items():
            if value is not None or SETTINGS[name].takes_null:
                merged[name], given[name] = value, source.where(name)
    try:
        config = _config.validate_python(merged)
    except ValidationError as error:
        raise ConfigError("; ".join(_sentence(dict(e), sources) for e in error.errors())) from None
    paths: dict[str, Any] = {
        name: value.expanduser() for name, value in vars(config).items() if isinstance(value, Path)
    }
    folders = tuple(folder.expanduser() for folder in config.media_folder)
    return dataclasses.replace(
        config, media_folder=folders, given=given, settings_file=file, **paths
    )


def default_files(environment: Mapping[str, str] | None = None) -> list[Path]:
    """The files that are looked for, in order: in the current folder, then in the user's folder for
    settings. Only the first that exists is read."""
    environment = os.environ if environment is None else environment
    base = Path(environment.get("XDG_CONFIG_HOME", ""))  # a relative path is invalid there
    folder = base if base.is_absolute() else Path("~/.config").expanduser()
    return [Path(FILE_NAME).absolute(), folder / "rekindle" / FILE_NAME]


def _default_file(environment: Mapping[str, str]) -> Path | None:
    if named := environment.get("REKINDLE_CONFIG"):
        return Path(named)
    return next(filter(_is_there, default_files(environment)), None)


def _is_there(path: Path) -> bool:
    with suppress(OSError):  # a folder of another user, which cannot be meant
        return path.exists()
    return False


def _from_file(path: Path | None) -> SettingsSource:
    raw = _read(path) if path else None
    if raw is None:
        return SettingsSource({}, str)
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must contain settings, one `name: value` per line")
    settings = {str(name).replace("-", "_"): value for name, value in raw.items()}
    return _known(SettingsSource(settings, lambda name: f"`{name}` in {path}", path))


def _read(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text") from None
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        raise ConfigError(f"{path} is not valid YAML: {problem}") from None


def _from_disk_variable(environment: Mapping[str, str]) -> SettingsSource:
    """The disk budget in gigabytes, in the variable that similar programs use."""
    written = environment.get(DISK_VARIABLE, "").strip()
    if not written:
        return SettingsSource({}, str)
    is_number = re.fullmatch(r"\d{1,18}(?:\.\d{1,9})?", written)
    if not is_number or not (size := int(Fraction(written) * GB)):
        raise ConfigError(f"`{DISK_VARIABLE}`: takes a positive number of GB (got {written!r})")
    return SettingsSource({"disk_cache": size}, lambda _name: f"`{DISK_VARIABLE}`")


def _from_environment(environment: Mapping[str, str]) -> SettingsSource:
    """The variables with our prefix. An empty one counts as not set."""
    written = {
        name.removeprefix(ENV_PREFIX).lower(): value
        for name, value in environment.items()
        if name.startswith(ENV_PREFIX) and value
    }
    ours = {name: value for name, value in written.items() if name not in OTHER_VARIABLES}
    source = _known(SettingsSource(ours, lambda name: f"`{ENV_PREFIX}{name.upper()}`"))
    settings = {name: None if _is_null(name, value) else value for name, value in ours.items()}
    return SettingsSource(settings, source.spell)


def _is_null(name: str, written: str) -> bool:
    """Whether a variable means null. For some settings `none` is a value of its own."""
    return written.lower() in (("null", "none") if SETTINGS[name].takes_null else ("null",))


def _from_flags(flags: Mapping[str, Any], spell: Spell) -> SettingsSource:
    given = {name: value for name, value in flags.items() if value not in (None, (), [])}
    return _known(SettingsSource(given, spell))


def _known(source: SettingsSource) -> SettingsSource:
    """Return the source, or raise ConfigError if it has an unknown setting."""
    for name in source.settings:
        if name not in SETTINGS:
            raise ConfigError(unknown_setting(name, SETTINGS, source.spell))
    return source


def _sentence(error: Mapping[str, Any], sources: Sequence[SettingsSource]) -> str:
    name = str(error["loc"][0])
    spell = next(source.spell for source in reversed(sources) if name in source.settings)
    path = error["loc"][1:] if name in ("projects", "models") else ()
    inside = f", `{'.'.join(map(str, path))}`" if path else ""
    secret = SETTINGS[name].setting.secret or (inside and isinstance(error["input"], dict))
    got = "" if secret else f" (got {error['input']!r})"
    return f"{spell(name)}{inside}: {error['msg'].removeprefix('Value error, ')}{got}"


def values_in_force(config: Config) -> dict[str, Any]:
    """Return every setting as JSON: its value, and where it was set. Secrets are hidden."""
    return {
        name: {"value": _as_json(getattr(config, name), declared), "from": origin(config, name)}
        for name, declared in SETTINGS.items()
    }


def origin(config: Config, name: str) -> str:
    """Where the value of a setting comes from."""
    return config.given.get(name, "default")


def _as_json(value: Any, declared: Declaration) -> Any:
    if declared.setting.secret and value:
        return HIDDEN
    if isinstance(value, tuple | Mapping):
        return [str(each) for each in value]  # presets by name
    return str(value) if isinstance(value, Path) else value
