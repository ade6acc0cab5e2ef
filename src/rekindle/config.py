"""Settings: `rekindle.yaml`, then `REKINDLE_*`, then flags. The later one wins."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from rekindle.errors import ConfigError

CONFIG_FILE = Path("rekindle.yaml")
ENV_PREFIX = "REKINDLE_"
OUTSIDE_SETTINGS = {"llama_lib", "config"}  # REKINDLE_ variables read elsewhere

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", re.IGNORECASE)


def parse_size(value: object) -> object:
    """`2GB`, `512MiB`, `1.5g` or a number of bytes, as bytes."""
    if not isinstance(value, str):
        return value
    found = _SIZE.fullmatch(value.strip())
    if found is None:
        raise ValueError("takes a size such as 2GB, 512MiB or a number of bytes")
    number, unit = found.groups()
    return int(float(number) * {**_UNITS, **_BINARY_UNITS}[unit.lower()])


def _listed(value: object) -> object:
    """One value, or several separated by commas, as a list."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


Size = Annotated[int, BeforeValidator(parse_size), Field(ge=0)]
Names = Annotated[tuple[str, ...], BeforeValidator(_listed)]


class Config(BaseModel):
    """Everything a server is started with."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: Names = ()
    host: str = "127.0.0.1"
    port: int = Field(8080, ge=0, le=65535)
    api_key: Names = ()
    no_auth: bool = False
    exact: bool = False
    parallel: int = Field(16, ge=1, le=128)
    queue: int = Field(256, ge=0)
    max_model_len: int | None = Field(None, ge=16)
    kv_fraction: float = Field(0.3, gt=0, lt=1)
    ram_cache: Size = 2 << 30
    threads: int | None = Field(None, ge=1)
    gpu_layers: int | None = Field(None, ge=0)
    models_dir: Path = Path("~/.cache/rekindle/models")
    log_level: str = Field("info", pattern="^(debug|info|warning|error)$")
    # What a request gets that does not say.
    max_tokens: int | None = Field(100, ge=1)
    temperature: float = Field(0.7, ge=0)
    top_p: float = Field(0.9, gt=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0)
    repetition_context_size: int = Field(20, ge=0)


def load_config(
    flags: Mapping[str, Any], environment: Mapping[str, str] | None = None, file: Path | None = None
) -> Config:
    """Merge the three sources; raises ConfigError that names the setting and where it came from."""
    environment = os.environ if environment is None else environment
    merged = {
        **_from_file(file or _default_file(environment)),
        **_from_environment(environment),
        **{name: value for name, value in flags.items() if value not in (None, (), [])},
    }
    try:
        config = Config.model_validate(merged)
    except ValidationError as error:
        raise ConfigError("; ".join(_sentence(dict(e)) for e in error.errors())) from None
    return config.model_copy(update={"models_dir": config.models_dir.expanduser()})


def _default_file(environment: Mapping[str, str]) -> Path | None:
    if named := environment.get("REKINDLE_CONFIG"):
        return Path(named)
    return CONFIG_FILE if CONFIG_FILE.exists() else None


def _from_file(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        raw = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold settings, one `name: value` a line")
    settings = {str(name).replace("-", "_"): value for name, value in raw.items()}
    _refuse_unknown(settings, f"in {path}")
    return settings


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    settings = {
        name.removeprefix(ENV_PREFIX).lower(): value
        for name, value in environment.items()
        if name.startswith(ENV_PREFIX)
    }
    settings = {name: value for name, value in settings.items() if name not in OUTSIDE_SETTINGS}
    _refuse_unknown(settings, "in the environment", spell=lambda n: ENV_PREFIX + n.upper())
    return {
        name: None if value.lower() in ("null", "none") else value
        for name, value in settings.items()
    }


def _refuse_unknown(
    settings: Mapping[str, Any], where: str, spell: Any = lambda name: name
) -> None:
    for name in settings:
        if name not in Config.model_fields:
            close = difflib.get_close_matches(name, Config.model_fields, 1)
            hint = f"; did you mean `{spell(close[0])}`?" if close else ""
            raise ConfigError(f"unknown setting `{spell(name)}` {where}{hint}")


def _sentence(error: dict[str, Any]) -> str:
    name = str(error["loc"][0]) if error["loc"] else "settings"
    return f"`{name}`: {error['msg']} (got {error['input']!r})"
