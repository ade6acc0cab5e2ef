"""Settings: `rekindle.yaml`, `MAX_KV_SIZE_GB`, `REKINDLE_*`, then flags. The later one wins.

What the runtime needs is declared in `protocol.settings`, everything else here.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import yaml
from annotated_types import Gt, Interval
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic.dataclasses import dataclass

from rekindle.errors import ConfigError
from rekindle.media.addresses import parse_listed
from rekindle.protocol.settings import (
    COUNT_LIMIT,
    GB,
    Name,
    RuntimeSettings,
    Setting,
    split_commas,
)

CONFIG_FILE = Path("rekindle.yaml")
ENV_PREFIX = "REKINDLE_"
OUTSIDE_SETTINGS = {"llama_lib", "config", "engine_module"}  # REKINDLE_ variables read elsewhere
DISK_VARIABLE = "MAX_KV_SIZE_GB"

_STRICT = ConfigDict(extra="forbid", protected_namespaces=(), allow_inf_nan=False)
_ORIGIN = re.compile(r"null|[a-z][a-z0-9+.-]*://[^\s/?#@A-Z]+")
_NUMBER = re.compile(r"\d{1,18}(?:\.\d{1,9})?")


def _check_origin(origin: str) -> str:
    """As browsers send it, or nothing would ever equal it."""
    if origin != "*" and not _ORIGIN.fullmatch(origin):
        raise ValueError("takes * or an origin such as https://example.org or http://10.0.0.7:3000")
    return origin


def _check_host(host: str) -> str:
    """A name, an address or a network."""
    parse_listed(host)
    return host


def _parse_yaml(value: object) -> object:
    """A variable of the environment holds the same lines as the file."""
    if not isinstance(value, str):
        return value
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        raise ValueError("takes YAML: the projects by name") from None


def _expand_names(tools: object) -> object:
    """A tool may be given by its name alone; it is then a function without a description."""
    if not isinstance(tools, list):
        return tools
    return [_function(tool) if isinstance(tool, str) else tool for tool in tools]


def _function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {}}}


class _Section(BaseModel):
    """A part of the file below the settings; an unknown name in it is an error as well."""

    model_config = _STRICT | ConfigDict(frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        settings = {str(name).replace("-", "_"): value for name, value in raw.items()}
        for name in settings:
            if name not in cls.model_fields:
                raise ValueError(_unknown(name, cls.model_fields, lambda known: f"`{known}`"))
        return settings


class PresetCache(_Section):
    warm_on_startup: bool = False
    pinned: bool = False
    ttl: float | None = Field(default=1800, gt=0)


class Preset(_Section):
    """A prompt of the operator's own, under `projects:`, that may be computed at startup."""

    model: str | None = None  # None: the first that is served
    provider: str | None = None  # read by other programs that share the file
    system_prompt: str = Field(min_length=1)
    # As OpenAI describes tools; `server.models` checks them by the rules that requests obey.
    tools: Annotated[list[dict[str, Any]], BeforeValidator(_expand_names)] = []
    shared: bool = False  # for the holders of every key
    cache: PresetCache = PresetCache()


Names = Annotated[tuple[Name, ...], BeforeValidator(split_commas)]
Origin = Annotated[Name, AfterValidator(_check_origin)]
Origins = Annotated[tuple[Origin, ...], BeforeValidator(split_commas)]
Host = Annotated[Name, AfterValidator(_check_host)]
Hosts = Annotated[tuple[Host, ...], BeforeValidator(split_commas)]
Folders = Annotated[tuple[Path, ...], BeforeValidator(split_commas)]
Presets = Annotated[dict[str, Preset], BeforeValidator(_parse_yaml)]


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Config(RuntimeSettings):
    """Everything a server is started with."""

    model: Annotated[
        Names,
        Setting(
            "Catalogue name, GGUF file, MLX folder or hub id org/repo[:quant]; repeatable",
            "Server",
            "smollm2",
        ),
    ] = ()
    embedding_model: Annotated[
        Names,
        Setting(
            "The same for embeddings or reranking; repeatable; without a value minilm", "Server"
        ),
    ] = ()
    vlm: Annotated[
        bool | None,
        Setting(
            "See pictures, with a projector; no model named: smollm2-shapes",
            "Server",
            "where there is one",
        ),
    ] = None
    mmproj: Annotated[
        Path | None,
        Setting("The model's projector, a GGUF file", "Server", "mmproj*.gguf beside the model"),
    ] = None
    adapter: Annotated[
        Path | None,
        Setting(
            "Folder of a LoRA adapter for the model, which has to be in MLX's format", "Server"
        ),
    ] = None
    host: Annotated[Name, Setting("Address to listen on", "Server")] = "127.0.0.1"
    port: Annotated[
        int, Interval(ge=0, le=65535), Setting("Port to listen on; 0 for any free one", "Server")
    ] = 8080
    ollama_port: Annotated[
        int | None,
        Interval(ge=0, le=65535),
        Setting("Listen there as well, where tools expect Ollama: 11434", "Server", "none"),
    ] = None
    queue: Annotated[
        int, Interval(ge=0, le=COUNT_LIMIT), Setting("Turns that may wait", "Server")
    ] = 256
    step_timeout: Annotated[
        float,
        Gt(0),
        Setting(
            "Seconds without progress after which a model's process is replaced",
            "Server",
            flag=False,
        ),
    ] = 300.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Setting("debug, info, warning or error", "Server"),
    ] = "info"
    models_dir: Annotated[
        Path, Setting("Folder for models that are pulled", "Server", flag=False)
    ] = Path("~/.cache/rekindle/models")
    api_key: Annotated[
        Names, Setting("Accept this key; repeatable, each its own cache", "Access", secret=True)
    ] = ()
    admin_key: Annotated[
        Names, Setting("Accept this key and let it see every cache", "Access", secret=True)
    ] = ()
    api_keys_file: Annotated[
        Path | None, Setting("File of keys from `rekindle key`; may change any time", "Access")
    ] = None
    cors_origin: Annotated[
        Origins,
        Setting(
            "Let web pages of this origin call the server; repeatable, * for all",
            "Access",
            "on a loopback address, loopback origins",
        ),
    ] = ()
    media_allow: Annotated[
        Hosts,
        Setting(
            "Let pictures be fetched from this host, address or network; repeatable",
            "Access",
            "public addresses alone",
        ),
    ] = ()
    media_folder: Annotated[
        Folders,
        Setting("Let file: URLs name pictures in this folder; repeatable", "Access", "none"),
    ] = ()
    no_auth: Annotated[bool, Setting("Allow a public address without a key", "Access")] = False
    context_cache: Annotated[bool, Setting("Reuse state", "Cache")] = True
    exact: Annotated[bool, Setting("Warm answers bit-identical to cold ones", "Cache")] = False
    force_cache: Annotated[
        bool, Setting("Name conversations that have no name of their own", "Cache")
    ] = False
    normalise: Annotated[
        bool, Setting("Take out headers that change with every request", "Cache")
    ] = True
    projects: Annotated[
        Presets, Setting("Prompts to prepare at startup, by name", "Cache", flag=False)
    ] = dataclasses.field(default_factory=dict)
    max_tokens: Annotated[
        int | None,
        Interval(ge=1, le=COUNT_LIMIT),
        Setting(
            "Longest chat reply of a request that gives no limit",
            "Replies",
            "until the model stops",
        ),
    ] = None
    completion_max_tokens: Annotated[
        int | None,
        Interval(ge=1, le=COUNT_LIMIT),
        Setting("The same of /v1/completions; null in the file: until the model stops", "Replies"),
    ] = 100
    prefill_assistant: Annotated[
        bool, Setting("Continue a final assistant message, as llama.cpp does", "Replies")
    ] = False
    temperature: Annotated[
        float, Interval(ge=0, le=100), Setting("Default of requests", "Replies", flag=False)
    ] = 0.7
    top_p: Annotated[
        float, Interval(gt=0, le=1), Setting("Default of requests", "Replies", flag=False)
    ] = 0.9
    repetition_penalty: Annotated[
        float, Interval(gt=0, le=100), Setting("Default of requests", "Replies", flag=False)
    ] = 1.0
    repetition_context_size: Annotated[
        int, Interval(ge=0, le=COUNT_LIMIT), Setting("Default of requests", "Replies", flag=False)
    ] = 20

    @property
    def runtime(self) -> RuntimeSettings:
        """The part that travels to the runtime."""
        names = (field.name for field in dataclasses.fields(RuntimeSettings))
        return RuntimeSettings(**{name: getattr(self, name) for name in names})


@dataclasses.dataclass(frozen=True, slots=True)
class Declaration:
    """A field of `Config` as the command line and the error sentences need it."""

    name: str
    type: Any  # with its annotations
    default: Any
    setting: Setting

    @property
    def takes_null(self) -> bool:
        return type(None) in get_args(get_args(self.type)[0])


def _declarations() -> dict[str, Declaration]:
    types = get_type_hints(Config, include_extras=True)
    found = {}
    for field in dataclasses.fields(Config):
        [setting] = (note for note in get_args(types[field.name]) if isinstance(note, Setting))
        found[field.name] = Declaration(field.name, types[field.name], field.default, setting)
    return found


SETTINGS = _declarations()
_config = TypeAdapter(Config)


@dataclasses.dataclass(frozen=True, slots=True)
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
        if value is not None or SETTINGS[name].takes_null
    }
    try:
        config = _config.validate_python(merged)
    except ValidationError as error:
        raise ConfigError("; ".join(_sentence(dict(e), sources) for e in error.errors())) from None
    paths: dict[str, Any] = {
        name: value.expanduser() for name, value in vars(config).items() if isinstance(value, Path)
    }
    folders = tuple(folder.expanduser() for folder in config.media_folder)
    return dataclasses.replace(config, media_folder=folders, **paths)


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
    """The disk budget in gigabytes, under the name that similar programs use."""
    written = environment.get(DISK_VARIABLE, "").strip()
    if not written:
        return Source({}, str)
    if not _NUMBER.fullmatch(written) or not (size := int(Fraction(written) * GB)):
        raise ConfigError(f"`{DISK_VARIABLE}`: takes a positive number of GB (got {written!r})")
    return Source({"disk_cache": size}, lambda _name: f"`{DISK_VARIABLE}`")


def _from_environment(environment: Mapping[str, str]) -> Source:
    """An empty variable counts as one that is not set."""
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
    """Whether a variable says null; `none` may also be a value, such as the name of a format."""
    return written.lower() in (("null", "none") if SETTINGS[name].takes_null else ("null",))


def _from_flags(flags: Mapping[str, Any], spell: Callable[[str], str]) -> Source:
    given = {name: value for name, value in flags.items() if value not in (None, (), [])}
    return _known(Source(given, spell))


def _known(source: Source) -> Source:
    """Refuse a setting that does not exist."""
    for name in source.settings:
        if name not in SETTINGS:
            raise ConfigError(_unknown(name, SETTINGS, source.spell))
    return source


def _unknown(name: str, known: Iterable[str], spell: Callable[[str], str]) -> str:
    close = difflib.get_close_matches(name, list(known), 1)
    hint = f"; did you mean {spell(close[0])}?" if close else ""
    return f"unknown setting {spell(name)}{hint}"


def _sentence(error: Mapping[str, Any], sources: Sequence[Source]) -> str:
    name = str(error["loc"][0])
    spell = next(source.spell for source in reversed(sources) if name in source.settings)
    path = error["loc"][1:] if name == "projects" else ()
    inside = f", `{'.'.join(map(str, path))}`" if path else ""
    secret = SETTINGS[name].setting.secret or (inside and isinstance(error["input"], dict))
    got = "" if secret else f" (got {error['input']!r})"
    return f"{spell(name)}{inside}: {error['msg'].removeprefix('Value error, ')}{got}"
