"""Declares all settings of a server. `protocol.settings` declares those of the runtime."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

from annotated_types import Gt, Interval
from pydantic import AfterValidator, BeforeValidator, ConfigDict
from pydantic.dataclasses import dataclass

from rekindle.config.presets import Aliases, Models, Presets
from rekindle.media.addresses import parse_listed
from rekindle.protocol.settings import (
    COUNT_LIMIT,
    MB,
    Count,
    Name,
    OptionalDuration,
    OptionalSize,
    RuntimeSettings,
    Setting,
    Size,
    split_commas,
)

_STRICT = ConfigDict(extra="forbid", protected_namespaces=(), allow_inf_nan=False)
_SERVER_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_ORIGIN = re.compile(r"null|[a-z][a-z0-9+.-]*://[^\s/?#@A-Z]+")


def _check_origin(origin: str) -> str:
    """Refuse an origin that is not spelled as browsers send it, because it would never match."""
    if origin != "*" and not _ORIGIN.fullmatch(origin):
        raise ValueError("takes * or an origin such as https://example.org or http://10.0.0.7:3000")
    return origin


def _check_server_name(name: str) -> str:
    """Refuse a name with a scheme, a port or a pattern, because it would never match."""
    if not _SERVER_NAME.fullmatch(name):
        raise ValueError("takes a name without scheme and port, such as models.example.org")
    return name.lower()


def _check_host(host: str) -> str:
    """Refuse anything but a name, an address or a network."""
    parse_listed(host)
    return host


Port = Annotated[int, Interval(ge=0, le=65535)]
OptionalPort = Annotated[int | None, Interval(ge=0, le=65535)]
OptionalTokens = Annotated[int | None, Interval(ge=1, le=COUNT_LIMIT)]
OptionalSeed = Annotated[int | None, Interval(ge=0, lt=1 << 63)]
Seconds = Annotated[float, Gt(0)]
Drain = Annotated[float, Interval(ge=0, le=86_400)]
Temperature = Annotated[float, Interval(ge=0, le=100)]
Probability = Annotated[float, Interval(gt=0, le=1)]
Penalty = Annotated[float, Interval(gt=0, le=100)]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
Names = Annotated[tuple[Name, ...], BeforeValidator(split_commas)]
Origin = Annotated[Name, AfterValidator(_check_origin)]
Origins = Annotated[tuple[Origin, ...], BeforeValidator(split_commas)]
ServerName = Annotated[Name, AfterValidator(_check_server_name)]
ServerNames = Annotated[tuple[ServerName, ...], BeforeValidator(split_commas)]
Host = Annotated[Name, AfterValidator(_check_host)]
Hosts = Annotated[tuple[Host, ...], BeforeValidator(split_commas)]
Folders = Annotated[tuple[Path, ...], BeforeValidator(split_commas)]

_server = partial(Setting, "Server")
_access = partial(Setting, "Access")
_cache = partial(Setting, "Cache")
_replies = partial(Setting, "Responses")
_request_default = Setting(
    "Responses", "Value for requests that do not have this field", flag=False
)


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Config(RuntimeSettings):
    model: Annotated[
        Names,
        _server(
            "Catalogue name, GGUF file, model folder or org/repo[:quant]; repeatable", "smollm2"
        ),
    ] = ()
    models: Annotated[
        Models, _server("Models by name that are loaded when a request names them", flag=False)
    ] = dataclasses.field(default_factory=dict)
    max_memory: Annotated[
        OptionalSize,
        _server("Memory of all models together; the least recently used is unloaded", "no limit"),
    ] = None
    idle_unload: Annotated[
        OptionalDuration,
        _server("Unload a model that was loaded on request when idle, such as 15m", "never"),
    ] = None
    any_model_name: Annotated[
        bool, _server("Answer requests for unknown models with the model that is served")
    ] = False
    aliases: Annotated[
        Aliases, _server("Other names of models; * stands for any text", flag=False)
    ] = dataclasses.field(default_factory=dict)
    embedding_model: Annotated[
        Names, _server("Embedding model or reranker; minilm if no value follows; repeatable")
    ] = ()
    vlm: Annotated[
        bool | None,
        _server(
            "Accept images; the default model is then smollm2-shapes", "if there is a projector"
        ),
    ] = None
    mmproj: Annotated[
        Path | None, _server("Projector of the model, a GGUF file", "mmproj*.gguf in its folder")
    ] = None
    adapter: Annotated[
        Names,
        _server("LoRA adapter: [NAME=]FILE.gguf, repeatable, or a folder for an MLX model"),
    ] = ()
    host: Annotated[Name, _server("Address to listen on")] = "127.0.0.1"
    port: Annotated[Port, _server("Port to listen on; 0 for any free port")] = 8080
    ollama_port: Annotated[
        OptionalPort, _server("Second port, for clients that expect Ollama: 11434", "none")
    ] = None
    uds: Annotated[Path | None, _server("Listen on this Unix socket instead of a port", "none")] = (
        None
    )
    tls_cert: Annotated[
        Path | None, _server("Serve HTTPS with this certificate chain, a PEM file", "none")
    ] = None
    tls_key: Annotated[
        Path | None, _server("The certificate's private key, a PEM file", "in --tls-cert")
    ] = None
    drain_timeout: Annotated[
        Drain, _server("Seconds that requests in flight have when the server stops")
    ] = 30.0
    queue: Annotated[Count, _server("Maximum number of waiting turns")] = 256
    step_timeout: Annotated[
        Seconds, _server("Seconds without progress before a model is restarted", flag=False)
    ] = 300.0
    log_level: Annotated[LogLevel, _server("Log level: debug, info, warning or error")] = "info"
    log_format: Annotated[LogFormat, _server("Format of log lines: text or json")] = "text"
    log_file: Annotated[
        Path | None,
        _server("Write the log to this file, reopened when it is moved", "terminal"),
    ] = None
    log_file_size: Annotated[
        Size, _server("Size at which a log file is replaced; five old ones are kept; 0: never")
    ] = 100 * MB
    otlp_endpoint: Annotated[
        Name | None,
        _server("Send a trace of every request to this OpenTelemetry collector", "none"),
    ] = None
    models_dir: Annotated[
        Path, _server("Folder for downloaded models; the flag offers all of them on request")
    ] = Path("~/.cache/rekindle/models")
    api_key: Annotated[
        Names, _access("Accept this API key, with its own cache; repeatable", secret=True)
    ] = ()
    admin_key: Annotated[
        Names, _access("Accept this API key, which can see all caches; repeatable", secret=True)
    ] = ()
    api_keys_file: Annotated[
        Path | None, _access("File of keys from `rekindle key`; reread when it changes")
    ] = None
    cors_origin: Annotated[
        Origins,
        _access("Allow web pages of this origin, or * for all; repeatable", "loopback origins"),
    ] = ()
    allowed_host: Annotated[
        ServerNames,
        _access("Accept requests that a proxy forwards for this Host; repeatable", "loopback"),
    ] = ()
    media_allow: Annotated[
        Hosts, _access("Allow images from this host or network; repeatable", "public addresses")
    ] = ()
    media_folder: Annotated[
        Folders, _access("Allow file: URLs of images in this folder; repeatable", "none")
    ] = ()
    no_auth: Annotated[bool, _access("Allow a public address without API keys")] = False
    context_cache: Annotated[bool, _cache("Reuse cached state")] = True
    exact: Annotated[
        bool, _cache("Make responses with reuse bit-identical to responses without")
    ] = False
    force_cache: Annotated[
        bool, _cache("Recognise conversations without a name by a fingerprint")
    ] = False
    normalise: Annotated[
        bool, _cache("Normalise parts of prompts that change with every request")
    ] = True
    projects: Annotated[
        Presets, _cache("Presets by name, which can be computed at startup", flag=False)
    ] = dataclasses.field(default_factory=dict)
    max_tokens: Annotated[
        OptionalTokens,
        _replies("Default limit of a chat response in tokens", "the model's own in the catalogue"),
    ] = None
    completion_max_tokens: Annotated[
        OptionalTokens, _replies("Default limit of a completion in tokens; null in the file: none")
    ] = 100
    prefill_assistant: Annotated[
        bool, _replies("Continue a final assistant message, as llama.cpp does")
    ] = False
    temperature: Annotated[Temperature, _request_default] = 0.7
    top_p: Annotated[Probability, _request_default] = 0.9
    repetition_penalty: Annotated[Penalty, _request_default] = 1.0
    repetition_context_size: Annotated[Count, _request_default] = 20
    seed: Annotated[OptionalSeed, _request_default] = None

    # These two are not settings.
    given: Mapping[str, str] = dataclasses.field(default_factory=dict)  # setting: where it was set
    settings_file: Path | None = None  # the file that was read

    @property
    def serves_models_dir(self) -> bool:
        """Whether every model in the models folder may be loaded. The setting in a file or in the
        environment only says where downloads are stored."""
        return self.given.get("models_dir") == "--models-dir"

    @property
    def loads_on_demand(self) -> bool:
        return bool(self.models) or self.serves_models_dir

    @property
    def runtime(self) -> RuntimeSettings:
        """The settings that travel to the runtime."""
        names = (field.name for field in dataclasses.fields(RuntimeSettings))
        return RuntimeSettings(**{name: getattr(self, name) for name in names})


@dataclasses.dataclass(frozen=True, slots=True)
class Declaration:
    """A field of `Config`, for the command line and error messages."""

    name: str
    type: Any  # including its annotations
    default: Any
    setting: Setting

    @property
    def takes_null(self) -> bool:
        return type(None) in get_args(get_args(self.type)[0])


def _declare() -> dict[str, Declaration]:
    types = get_type_hints(Config, include_extras=True)
    found = {}
    for field in dataclasses.fields(Config):
        notes = [note for note in get_args(types[field.name]) if isinstance(note, Setting)]
        for setting in notes:
            found[field.name] = Declaration(field.name, types[field.name], field.default, setting)
    return found


SETTINGS = _declare()
