"""The functions a reply may call, in OpenAI's form, for chat, cache endpoints and presets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from rekindle.api.base.fields import FunctionName, shallow

MOST_TOOLS = 128


class Function(BaseModel):
    """What the template reads of a function; unknown fields are passed on."""

    model_config = ConfigDict(strict=True, extra="allow")

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None


class Tool(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["function"]
    function: Function


def _few(tools: Any) -> Any:
    """Counted before the tools themselves are checked."""
    if isinstance(tools, list) and len(tools) > MOST_TOOLS:
        raise ValueError(f"takes at most {MOST_TOOLS} items")
    return tools


def _distinct(tools: list[Tool]) -> list[Tool]:
    seen: set[str] = set()
    for tool in tools:
        name = tool.function.name
        if name in seen:
            raise ValueError(f"has more than one function called {name!r}")
        seen.add(name)
    return tools


Tools = Annotated[
    list[Tool],
    Field(fail_fast=True),
    AfterValidator(_distinct),
    BeforeValidator(shallow),
    BeforeValidator(_few),
]


def described(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    """What the template reads: without nulls, except those inside a function's schema."""
    return [tool.model_dump(exclude_none=True) for tool in tools or ()] or None
