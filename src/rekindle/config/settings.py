"""Declares all settings of a server. `protocol.settings` declares those of the runtime."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

from annotated_types import Gt, Interval
from pydantic import AfterValidator, BeforeValidator, ConfigDict
from pydantic.dataclasses import dataclass

from rekindle.config.presets import Presets
from rekindle.media.addresses import parse_listed
from rekindle.protocol.settings import (
    COUNT_LIMIT,
    Count,
    Name,
    RuntimeSettings,
    Setting,
    split_commas,
)

_STRICT = ConfigDict(extra="forbid", protected_namespaces=(), allow_inf_nan=False)
_ORIGIN = re.compile(r"null|[a-z][a-z0-9+.-]*://[^\s/?#@A-Z]+")


def _check_origin(origin: str) -> str:
    """Refuse an origin that is not spelled as browsers send it, because it would never match."""
    if origin != "*" and not _ORIGIN.fullmatch(origin):
        raise ValueError("takes * or an origin such as https://example.org or http://10.0.0.7:3000")
    return origin


def _check_host(host: str) -> str:
    """Refuse anything but a name, an address or a network."""
    parse_listed(host)
    return host


Port = Interval(ge=0, le=65535)
OptionalTokens = Annotated[int | None, Interval(ge=1, le=COUNT_LIMIT)]
Names = Annotated[tuple[Name, ...], BeforeValidator(split_commas)]
Origin = Annotated[Name, AfterValidator(_check_origin)]
Origins = Annotated[tuple[Origin, ...], BeforeValidator(split_commas)]
Host = Annotated[Name, AfterValidator(_check_host)]
Hosts = Annotated[tuple[Host, ...], BeforeValidator(split_commas)]
Folders = Annotated[tuple[Path, ...], BeforeValidator(split_commas)]


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Config(RuntimeSettings):
    """All settings of a server."""

    model: Annotated[
        Names,
        Setting(
            "Model: catalogue name, GGUF file, MLX folder or org/repo[:quant]; repeatable",
            "Server",
            "smollm2",
        ),
    ] = ()
    embedding_model: Annotated[
        Names,
        Setting("Embedding model or reranker; repeatable; without a value minilm", "Server"),
    ] = ()
    vlm: Annotated[
        bool | None,
        Setting(
            "Accept pictures; if no model is named, serve smollm2-shapes",
            "Server",
            "if there is a projector",
        ),
    ] = None
    mmproj: Annotated[
        Path | None,
        Setting("Projector of the model, a GGUF file", "Server", "mmproj*.gguf in its folder"),
    ] = None
    adapter: Annotated[
        Path | None, Setting("Folder of a LoRA adapter; only for MLX models", "Server")
    ] = None
    host: Annotated[Name, Setting("Address to listen on", "Server")] = "127.0.0.1"
    port: Annotated[int, Port, Setting("Port to listen on; 0 for a free one", "Server")] = 8080
    ollama_port: Annotated[
        int | None, Port, Setting("Second port, for Ollama clients: 11434", "Server", "none")
    ] = None
    queue: Annotated[Count, Setting("Maximum number of waiting turns", "Server")] = 256
    step_timeout: Annotated[
        float,
        Gt(0),
        Setting(
            "Seconds without progress after which a model's process is restarted",
            "Server",
            flag=False,
        ),
    ] = 300.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Setting("Log level: debug, info, warning or error", "Server"),
    ] = "info"
    models_dir: Annotated[Path, Setting("Folder for downloaded models", "Server", flag=False)] = (
        Path("~/.cache/rekindle/models")
    )
    api_key: Annotated[
        Names,
        Setting("Accept this API key, with its own cache; repeatable", "Access", secret=True),
    ] = ()
    admin_key: Annotated[
        Names, Setting("Accept this API key, which can see all caches", "Access", secret=True)
    ] = ()
    api_keys_file: Annotated[
        Path | None, Setting("File of keys from `rekindle key`; reread when it changes", "Access")
    ] = None
    cors_origin: Annotated[
        Origins,
        Setting(
            "Allow web pages of this origin; repeatable; * allows all",
            "Access",
            "loopback origins on a loopback address",
        ),
    ] = ()
    media_allow: Annotated[
        Hosts,
        Setting(
            "Allow fetching pictures from this host, address or network; repeatable",
            "Access",
            "public addresses only",
        ),
    ] = ()
    media_folder: Annotated[
        Folders,
        Setting("Allow file: URLs of pictures in this folder; repeatable", "Access", "none"),
    ] = ()
    no_auth: Annotated[bool, Setting("Allow a public address without API keys", "Access")] = False
    context_cache: Annotated[bool, Setting("Reuse cached state", "Cache")] = True
    exact: Annotated[bool, Setting("Make warm replies bit-identical to cold ones", "Cache")] = False
    force_cache: Annotated[
        bool, Setting("Give every conversation without a name an automatic one", "Cache")
    ] = False
    normalise: Annotated[
        bool, Setting("Normalise prompt parts that change with every request", "Cache")
    ] = True
    projects: Annotated[
        Presets, Setting("Presets by name, which can be computed at startup", "Cache", flag=False)
    ] = dataclasses.field(default_factory=dict)
    max_tokens: Annotated[
        OptionalTokens,
        Setting("Default maximum length of a chat reply in tokens", "Replies", "no limit"),
    ] = None
    completion_max_tokens: Annotated[
        OptionalTokens,
        Setting("The same for /v1/completions; null in the file: no limit", "Replies"),
    ] = 100
    prefill_assistant: Annotated[
        bool, Setting("Continue a final assistant message, like llama.cpp", "Replies")
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
        Count, Setting("Default of requests", "Replies", flag=False)
    ] = 20

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
        [setting] = (note for note in get_args(types[field.name]) if isinstance(note, Setting))
        found[field.name] = Declaration(field.name, types[field.name], field.default, setting)
    return found


SETTINGS = _declare()
