"""Defines presets, the operator's own prompts under `projects:` in the settings file."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

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


Presets = Annotated[dict[str, Preset], _parse_yaml("the projects by name")]
Pattern = Annotated[str, Field(min_length=1, max_length=256)]
Aliases = Annotated[dict[Pattern, Pattern], _parse_yaml("the served model by name or pattern")]
