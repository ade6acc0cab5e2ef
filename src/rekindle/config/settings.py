"""Everything a server is started with, one declaration a setting.

What the runtime needs is declared in `protocol.settings`, everything else here.
"""

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
from rekindle.protocol.settings import COUNT_LIMIT, Name, RuntimeSettings, Setting, split_commas

_STRICT = ConfigDict(extra="forbid", protected_namespaces=(), allow_inf_nan=False)
_ORIGIN = re.compile(r"null|[a-z][a-z0-9+.-]*://[^\s/?#@A-Z]+")


def _check_origin(origin: str) -> str:
    """As browsers send it, or nothing would ever equal it."""
    if origin != "*" and not _ORIGIN.fullmatch(origin):
        raise ValueError("takes * or an origin such as https://example.org or http://10.0.0.7:3000")
    return origin


def _check_host(host: str) -> str:
    """A name, an address or a network."""
    parse_listed(host)
    return host


Names = Annotated[tuple[Name, ...], BeforeValidator(split_commas)]
Origin = Annotated[Name, AfterValidator(_check_origin)]
Origins = Annotated[tuple[Origin, ...], BeforeValidator(split_commas)]
Host = Annotated[Name, AfterValidator(_check_host)]
Hosts = Annotated[tuple[Host, ...], BeforeValidator(split_commas)]
Folders = Annotated[tuple[Path, ...], BeforeValidator(split_commas)]


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


def _declare() -> dict[str, Declaration]:
    types = get_type_hints(Config, include_extras=True)
    found = {}
    for field in dataclasses.fields(Config):
        [setting] = (note for note in get_args(types[field.name]) if isinstance(note, Setting))
        found[field.name] = Declaration(field.name, types[field.name], field.default, setting)
    return found


SETTINGS = _declare()
