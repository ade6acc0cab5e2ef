"""Presets: prompts of the operator's own, under `projects:` in the file."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

# ----------------------------------------------------------------------
# How a setting is written in the place it came from, and which one was probably meant.

Spell = Callable[[str], str]  # the name of a setting, as that place writes it


def as_flag(name: str) -> str:
    return f"`--{name.replace('_', '-')}`"


def unknown_setting(name: str, known: Iterable[str], spell: Spell) -> str:
    """The sentence about a setting that does not exist."""
    close = difflib.get_close_matches(name, list(known), 1)
    hint = f"; did you mean {spell(close[0])}?" if close else ""
    return f"unknown setting {spell(name)}{hint}"


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
                raise ValueError(
                    unknown_setting(name, cls.model_fields, lambda known: f"`{known}`")
                )
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


Presets = Annotated[dict[str, Preset], BeforeValidator(_parse_yaml)]
