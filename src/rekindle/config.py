"""Settings: `rekindle.yaml`, `MAX_KV_SIZE_GB`, `REKINDLE_*`, then flags. The later one wins."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from rekindle.errors import ConfigError
from rekindle.server.presets import Projects

CONFIG_FILE = Path("rekindle.yaml")
ENV_PREFIX = "REKINDLE_"
OUTSIDE_SETTINGS = {"llama_lib", "config", "engine_module"}  # REKINDLE_ variables read elsewhere
SECRETS = {"api_key", "admin_key"}
FOLDERS = ("models_dir", "cache_dir", "api_keys_file")  # where `~` is the home folder
DISK_VARIABLE = "MAX_KV_SIZE_GB"
GB, GIB = 10**9, 1 << 30
AUTO = "auto"  # a format that the model's template tells
MOST = 10_000_000  # of anything countable: what lies above is a slip of the keyboard

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
_NUMBER = re.compile(r"\d{1,18}(?:\.\d{1,9})?")
_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)\s*((?:[kmgt]i?)?)b?", re.IGNORECASE)


def parse_size(value: object) -> object:
    """`2GB`, `512MiB`, `1.5g` or a number of bytes, as bytes."""
    if not isinstance(value, str):
        return value
    found = _SIZE.fullmatch(value.strip())
    if found is None:
        raise ValueError("takes a size such as 2GB, 512MiB or a number of bytes")
    number, unit = found.groups()
    return int(Fraction(number) * {**_UNITS, **_BINARY_UNITS}[unit.lower()])


def _listed(value: object) -> object:
    """One value, or several separated by commas, as a list."""
    if not isinstance(value, str):
        return value
    return [part.strip() for part in value.split(",") if part.strip()]


Size = Annotated[int, BeforeValidator(parse_size), Field(ge=0, lt=1 << 60)]
Name = Annotated[str, Field(min_length=1)]  # an empty key would be one that anybody has
Names = Annotated[tuple[Name, ...], BeforeValidator(_listed)]


class Config(BaseModel):
    """Everything a server is started with."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False
    )

    model: Names = ()
    host: Name = "127.0.0.1"
    port: int = Field(8080, ge=0, le=65535)
    api_key: Names = ()
    admin_key: Names = ()
    api_keys_file: Path | None = None
    no_auth: bool = False
    exact: bool = False
    parallel: int = Field(16, ge=1, le=128)
    queue: int = Field(256, ge=0, le=MOST)
    max_model_len: int | None = Field(None, ge=16, le=MOST)
    kv_fraction: float = Field(0.3, gt=0, lt=1)
    fp8_kvcache: bool = False
    ram_cache: Size = 2 * GIB
    disk_cache: Size = 10 * GB
    disk_floor: Size = 1 * GIB  # free space on the disk that is left to others
    cache_dir: Path = Path("~/.cache/rekindle/kv")
    cache_write: Literal["always", "named", "on-evict"] = "always"
    context_cache: bool = True
    force_cache: bool = False
    normalise: bool = True  # volatile headers at the top of prompts are taken out
    tool_format: Name = AUTO  # how the model writes calls; auto: as its template says
    reasoning_format: Name = AUTO  # and what it writes for itself
    key_ttl: float | None = Field(1800, gt=0)
    projects: Projects = {}
    threads: int | None = Field(None, ge=1, le=1024)
    gpu_layers: int | None = Field(None, ge=0, le=MOST)
    models_dir: Path = Path("~/.cache/rekindle/models")
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    # What a request gets that does not say.
    max_tokens: int | None = Field(100, ge=1, le=MOST)
    temperature: float = Field(0.7, ge=0, le=100)
    top_p: float = Field(0.9, gt=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    repetition_context_size: int = Field(20, ge=0, le=MOST)


@dataclass(frozen=True, slots=True)
class Source:
    """Settings from one place, and how a setting is spelled there."""

    settings: Mapping[str, Any]
    spell: Callable[[str], str]


def as_flag(name: str) -> str:
    return f"`--{name.replace('_', '-')}`"


def load_config(
    flags: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
    file: Path | None = None,
    *,
    spell: Callable[[str], str] = as_flag,
) -> Config:
    """Merge the sources; raises ConfigError that names the setting and where it came from."""
    environment = os.environ if environment is None else environment
    sources = [
        _from_file(file or _default_file(environment)),
        _from_disk_variable(environment),
        _from_environment(environment),
        _from_flags(flags, spell),
    ]
    merged = {
        name: value
        for source in sources
        for name, value in source.settings.items()
        if value is not None or _takes_null(name)
    }
    try:
        config = Config.model_validate(merged)
    except ValidationError as error:
        raise ConfigError("; ".join(_sentence(dict(e), sources) for e in error.errors())) from None
    folders = {name: path for name in FOLDERS if (path := getattr(config, name)) is not None}
    return config.model_copy(update={name: path.expanduser() for name, path in folders.items()})


def _takes_null(name: str) -> bool:
    return type(None) in get_args(Config.model_fields[name].annotation)


def _default_file(environment: Mapping[str, str]) -> Path | None:
    if named := environment.get("REKINDLE_CONFIG"):
        return Path(named)
    return CONFIG_FILE if CONFIG_FILE.exists() else None


def _from_file(path: Path | None) -> Source:
    raw = _read(path) if path else None
    if raw is None:
        return Source({}, str)
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold settings, one `name: value` a line")
    settings = {str(name).replace("-", "_"): value for name, value in raw.items()}
    return _known(Source(settings, lambda name: f"`{name}` in {path}"))


def _read(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text in UTF-8") from None
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        raise ConfigError(f"{path} is not valid YAML: {problem}") from None


def _from_disk_variable(environment: Mapping[str, str]) -> Source:
    """The disk budget as programs of the same kind have it: in gigabytes."""
    written = environment.get(DISK_VARIABLE, "").strip()
    if not written:
        return Source({}, str)
    if not _NUMBER.fullmatch(written) or not (size := int(Fraction(written) * GB)):
        raise ConfigError(f"`{DISK_VARIABLE}`: takes a positive number of GB (got {written!r})")
    return Source({"disk_cache": size}, lambda _name: f"`{DISK_VARIABLE}`")


def _from_environment(environment: Mapping[str, str]) -> Source:
    """An empty variable is one that is not set."""
    written = {
        name.removeprefix(ENV_PREFIX).lower(): value
        for name, value in environment.items()
        if name.startswith(ENV_PREFIX) and value
    }
    ours = {name: value for name, value in written.items() if name not in OUTSIDE_SETTINGS}
    source = _known(Source(ours, lambda name: f"`{ENV_PREFIX}{name.upper()}`"))
    settings = {name: None if _is_null(name, value) else value for name, value in ours.items()}
    return Source(settings, source.spell)


def _is_null(name: str, written: str) -> bool:
    """`none` may also be a word that a setting takes, such as the name of a format."""
    return written.lower() in (("null", "none") if _takes_null(name) else ("null",))


def _from_flags(flags: Mapping[str, Any], spell: Callable[[str], str]) -> Source:
    given = {name: value for name, value in flags.items() if value not in (None, (), [])}
    return _known(Source(given, spell))


def _known(source: Source) -> Source:
    """Refuse a setting that does not exist: a typo is never silence."""
    for name in source.settings:
        if name not in Config.model_fields:
            close = difflib.get_close_matches(name, Config.model_fields, 1)
            hint = f"; did you mean {source.spell(close[0])}?" if close else ""
            raise ConfigError(f"unknown setting {source.spell(name)}{hint}")
    return source


def _sentence(error: Mapping[str, Any], sources: Sequence[Source]) -> str:
    name = str(error["loc"][0])
    spell = next(source.spell for source in reversed(sources) if name in source.settings)
    path = error["loc"][1:] if name == "projects" else ()
    inside = f", `{'.'.join(map(str, path))}`" if path else ""
    secret = name in SECRETS or (inside and isinstance(error["input"], dict))
    got = "" if secret else f" (got {error['input']!r})"
    return f"{spell(name)}{inside}: {error['msg'].removeprefix('Value error, ')}{got}"
