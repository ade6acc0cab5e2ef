"""`tool_choice`: which of a request's tools its reply may call, or has to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from rekindle.api.fields import FunctionName, takes
from rekindle.api.tools import Tool
from rekindle.errors import BadRequest
from rekindle.protocol.requests import ToolUse


class _Form(BaseModel):
    model_config = ConfigDict(strict=True)


class FunctionNamed(_Form):
    name: FunctionName


class NamedTool(_Form):
    type: Literal["function"]
    function: FunctionNamed


class AllowedTools(_Form):
    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, fail_fast=True)


class AllowedChoice(_Form):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool | AllowedChoice,
    takes(
        '"none", "auto", "required", {"type": "function", "function": {"name": …}}, or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": …, "tools": […]}}'
    ),
]


def check(choice: ToolChoice | None, tools: Sequence[Tool] | None) -> None:
    """Refuse a choice among functions that the request does not define."""
    if choice == "required" and not tools:
        raise BadRequest('`tool_choice` "required" needs `tools`.', param="tool_choice")
    offered = {tool.function.name for tool in tools or ()}
    for name in _names(choice):
        if name not in offered:
            raise BadRequest(
                f"`tool_choice` names the function {name!r}, which is not among `tools`.",
                param="tool_choice",
            )


def tool_use(choice: ToolChoice | None, *, parallel: bool) -> ToolUse:
    """The choice as the runtime takes it."""
    match choice:
        case None:
            return ToolUse(parallel=parallel)
        case NamedTool():
            return ToolUse(choice="required", name=choice.function.name, parallel=parallel)
        case AllowedChoice():
            name = _only(choice)
            return ToolUse(choice=choice.allowed_tools.mode, name=name, parallel=parallel)
    return ToolUse(choice=choice, parallel=parallel)


def offered(choice: ToolChoice | None, tools: Sequence[Tool] | None) -> list[Tool]:
    """The tools that the prompt describes.

    Tools that are not allowed are left out, which changes the prompt. A single tool that has to be
    called is enforced by name instead, and the prompt stays the same.
    """
    if not isinstance(choice, AllowedChoice) or _only(choice):
        return list(tools or ())
    allowed = set(_names(choice))
    return [tool for tool in tools or () if tool.function.name in allowed]


def forces_call(choice: ToolChoice | None) -> bool:
    return tool_use(choice, parallel=True).choice == "required"


def _names(choice: ToolChoice | None) -> list[str]:
    match choice:
        case NamedTool():
            return [choice.function.name]
        case AllowedChoice():
            return [tool.function.name for tool in choice.allowed_tools.tools]
    return []


def _only(choice: AllowedChoice) -> str | None:
    """The one function that has to be called, where there is one."""
    names = set(_names(choice))
    single = len(names) == 1 and choice.allowed_tools.mode == "required"
    return names.pop() if single else None
