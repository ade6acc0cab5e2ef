"""A project: a prompt of the operator's own that is prepared when the server starts."""

from __future__ import annotations

import difflib
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from rekindle.api.tools import Tools


class _Part(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _known(cls, raw: Any) -> Any:
        """A typo is never silence, here as little as among the other settings."""
        if not isinstance(raw, dict):
            return raw
        settings = {str(name).replace("-", "_"): value for name, value in raw.items()}
        for name in settings:
            if name not in cls.model_fields:
                close = difflib.get_close_matches(name, cls.model_fields, 1)
                hint = f"; did you mean `{close[0]}`?" if close else ""
                raise ValueError(f"unknown setting `{name}`{hint}")
        return settings


def _described(tools: object) -> object:
    """A tool may be named alone; it is then one that says nothing about itself."""
    if not isinstance(tools, list):
        return tools
    return [_by_name(tool) if isinstance(tool, str) else tool for tool in tools]


def _by_name(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {}}}


class ProjectCache(_Part):
    warm_on_startup: bool = False
    pinned: bool = False
    ttl: float | None = Field(default=1800, gt=0)


class Project(_Part):
    model: str | None = None  # None: the first that is served
    provider: str | None = None  # of other programs that read the same file
    system_prompt: str = Field(min_length=1)
    tools: Annotated[Tools, BeforeValidator(_described)] = []
    shared: bool = False  # for the holders of every key
    cache: ProjectCache = ProjectCache()


def _written(value: object) -> object:
    """A variable of the environment holds the same lines as the file."""
    if not isinstance(value, str):
        return value
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        raise ValueError("takes YAML: the projects by name") from None


Projects = Annotated[dict[str, Project], BeforeValidator(_written)]
