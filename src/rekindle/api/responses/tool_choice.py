"""`tool_choice` of the Responses API: which tools a reply may call, or has to."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from rekindle.api.fields import shallow, takes
from rekindle.api.responses.tools import MOST_TOOLS, Toolbox
from rekindle.errors import BadRequest
from rekindle.protocol.requests import ToolUse

PARAM = "tool_choice"


class _Form(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class NamedTool(_Form):
    """One tool; of another type than `function` and `custom` it is one of OpenAI's own."""

    type: str = Field(max_length=128)
    name: str | None = None
    namespace: str | None = None

    @property
    def is_ours(self) -> bool:
        return self.type in ("function", "custom")


class AllowedTools(_Form):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, max_length=MOST_TOOLS, fail_fast=True)


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | AllowedTools | NamedTool,
    takes(
        '"none", "auto", "required", {"type": "function", "name": …}, {"type": "custom", '
        '"name": …} or {"type": "allowed_tools", "mode": …, "tools": […]}'
    ),
    BeforeValidator(shallow),
]


def shown_tools(choice: ToolChoice | None, toolbox: Toolbox) -> list[dict[str, Any]]:
    """The tools that the prompt describes: tools that are not allowed are left out. A single one
    that has to be called is enforced by its name, and the prompt stays the same."""
    if isinstance(choice, AllowedTools) and _single(choice, toolbox) is None:
        return toolbox.shown(_allowed(choice, toolbox))
    return toolbox.shown()


def tool_use(choice: ToolChoice | None, toolbox: Toolbox, *, parallel: bool) -> ToolUse:
    """The choice as the runtime takes it; one of a tool that is ignored is no choice."""
    match choice:
        case "none":
            return ToolUse(choice="none")
        case "required" if toolbox.offered:
            return ToolUse(choice="required", parallel=parallel)
        case "required" if not toolbox.ignored:
            raise BadRequest('`tool_choice` "required" needs `tools`.', param=PARAM)
        case NamedTool() if choice.is_ours:
            return ToolUse(choice="required", name=_found(choice, toolbox), parallel=parallel)
        case AllowedTools() if _allowed(choice, toolbox):
            name = _single(choice, toolbox)
            return ToolUse(choice=choice.mode, name=name, parallel=parallel)
        case AllowedTools():
            return ToolUse(choice="none")
    return ToolUse(parallel=parallel)


def forces_call(choice: ToolChoice | None, toolbox: Toolbox) -> bool:
    return tool_use(choice, toolbox, parallel=True).choice == "required"


def _allowed(choice: AllowedTools, toolbox: Toolbox) -> set[str]:
    return {_found(tool, toolbox) for tool in choice.tools if tool.is_ours}


def _single(choice: AllowedTools, toolbox: Toolbox) -> str | None:
    """The one tool that has to be called, where there is one."""
    names = _allowed(choice, toolbox)
    return names.pop() if len(names) == 1 and choice.mode == "required" else None


def _found(choice: NamedTool, toolbox: Toolbox) -> str:
    name = toolbox.resolve(choice.name or "", choice.namespace)
    if name not in toolbox.offered:
        raise BadRequest(
            f"`tool_choice` names the tool {(choice.name or '')[:128]!r}, which is not among "
            "`tools`.",
            param=PARAM,
        )
    return name
