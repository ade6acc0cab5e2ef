"""Defines the nested sections of the settings file: `projects:`, `models:` and `aliases:`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from rekindle.protocol.settings import OptionalContext, OptionalDuration

Spell = Callable[[str], str]  # the name of a setting as its source writes it


def unknown_setting(name: str, known: Iterable[str], spell: Spell) -> str:
    """The error message about an unknown setting, with the closest known name."""
    close = difflib.get_close_matches(name, list(known), 1)
    hint = f"; did you mean {spell(close[0]).partition(' in ')[0]}?" if close else ""
    return f"unknown setting {spell(name)}{hint}"


def _parse_yaml(what: str) -> BeforeValidator:
    """Parse an environment variable, which has the same content as the file."""

    def parse(value: object) -> object:
        if not isinstance(value, str):
            return value
        try:
            return yaml.safe_load(value)
        except yaml.YAMLError:
            raise ValueError(f"takes YAML: {what}") from None

    return BeforeValidator(parse)


def _expand_tool_names(tools: object) -> object:
    """Turn each tool that is only a name into a function without a description."""
    if not isinstance(tools, list):
        return tools
    return [
        {"type": "function", "function": {"name": tool, "parameters": {}}}
        if isinstance(tool, str)
        else tool
        for tool in tools
    ]


class _Section(BaseModel):
    """A nested section of the settings file, which refuses unknown names too."""

    model_config = ConfigDict(
        extra="forbid", protected_namespaces=(), allow_inf_nan=False, frozen=True
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        settings = {str(name).replace("-", "_"): value for name, value in raw.items()}
        for name in settings:
            if name not in cls.model_fields:
                raise ValueError(unknown_setting(name, cls.model_fields, "`{}`".format))
        return settings


Group = Annotated[str, Field(pattern=r"^[\w.@+-]{1,64}$")]


class PresetCache(_Section):
    warm_on_startup: bool = False
    pinned: bool = False
    ttl: float | None = Field(default=1800, gt=0)  # None: never expires

    @model_validator(mode="before")
    @classmethod
    def _keep_pins(cls, raw: Any) -> Any:
        """A pinned prompt never expires, unless it has a TTL."""
        is_pinned = isinstance(raw, dict) and raw.get("pinned") is True
        return {"ttl": None} | raw if is_pinned else raw


class Preset(_Section):
    """A prompt under `projects:`, which the server can compute at startup."""

    model: str | None = None  # None: the first served model
    provider: str | None = None  # ignored; other programs that share the file read it
    system_prompt: str = Field(min_length=1)
    # OpenAI's format. The front checks them like the tools of a request.
    tools: Annotated[list[dict[str, Any]], BeforeValidator(_expand_tool_names)] = []
    shared: bool | Group = False  # all tenants may reuse the state, or those of this group
    cache: PresetCache = PresetCache()


class ModelParameters(_Section):
    """Defaults of request fields for one model. None: the server's default."""

    max_tokens: int | None = Field(default=None, ge=1, le=10_000_000)
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0, le=100)
    repetition_context_size: int | None = Field(default=None, ge=0, le=10_000_000)
    seed: int | None = Field(default=None, ge=0, lt=1 << 63)


def _expand(path: Path) -> Path:
    return path.expanduser()


LocalPath = Annotated[Path, AfterValidator(_expand)]
#: A colon separates a model and its adapter, so it may not be part of an adapter's name.
AdapterName = Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]


class DeclaredModel(_Section):
    """A model under `models:`, which is loaded when a request names it."""

    model: str | None = Field(default=None, min_length=1)  # as for --model; None: the name itself
    keep_loaded: bool = False  # loaded at the start, and never unloaded to make room
    idle_unload: OptionalDuration = None  # None: the server's
    embedding: bool | None = None  # for vectors or scores; None: its files tell
    mmproj: LocalPath | None = None
    adapters: dict[AdapterName, LocalPath] = {}  # served as NAME:ADAPTER
    max_model_len: OptionalContext = None
    system: str | None = Field(default=None, min_length=1)  # of conversations without one
    parameters: ModelParameters = ModelParameters()


def _expand_model(models: object) -> object:
    """Turn a model that is only a source, or nothing, into a section."""
    if not isinstance(models, dict):
        return models
    return {
        name: {} if model is None else {"model": model} if isinstance(model, str) else model
        for name, model in models.items()
    }


ModelName = Annotated[str, Field(pattern=r"^[^\s*][^*]{0,255}$")]
Models = Annotated[
    dict[ModelName, DeclaredModel],
    BeforeValidator(_expand_model),
    _parse_yaml("the models by name"),
]
Presets = Annotated[dict[str, Preset], _parse_yaml("the projects by name")]
Pattern = Annotated[str, Field(min_length=1, max_length=256)]
Aliases = Annotated[dict[Pattern, Pattern], _parse_yaml("the served model by name or pattern")]
