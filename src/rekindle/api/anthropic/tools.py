"""Tools in Anthropic's form: those that a reply may call, and which of them it has to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)

from rekindle.api.anthropic.blocks import CacheControl
from rekindle.api.fields import ToolName, shallow
from rekindle.errors import BadRequest
from rekindle.protocol.requests import ToolUse

MOST_TOOLS = 1024
CUSTOM = "custom"  # the type of a tool that the client defines itself


class Tool(BaseModel):
    """One that the client defines, or, with a `type` like "web_search_20250305", one of
    Anthropic's, which are not to be had here."""

    model_config = ConfigDict(strict=True)

    name: ToolName | None = None
    type: str | None = Field(None, max_length=128)
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    cache_control: CacheControl | None = None

    @model_validator(mode="after")
    def _is_defined(self) -> Tool:
        if self.is_ours:
            for field_name in ("name", "input_schema"):
                if getattr(self, field_name) is None:
                    raise ValueError(f"needs `{field_name}`, as every tool of a client does")
        return self

    @property
    def is_ours(self) -> bool:
        """Whether the client says what it takes, and runs it."""
        return self.type in (None, CUSTOM)

    def described(self) -> dict[str, Any]:
        """As templates read it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.input_schema
        if self.strict is not None:
            function["strict"] = self.strict
        return {"type": "function", "function": function}


def _few(tools: Any) -> Any:
    """Counted before the tools themselves are checked."""
    if isinstance(tools, list) and len(tools) > MOST_TOOLS:
        raise ValueError(f"takes at most {MOST_TOOLS} items")
    return tools


def _distinct(tools: list[Tool]) -> list[Tool]:
    seen: set[str] = set()
    for tool in tools:
        if tool.name is not None and tool.name in seen:
            raise ValueError(f"has more than one tool called {tool.name!r}")
        seen.add(tool.name or "")
    return tools


Tools = Annotated[
    list[Tool],
    Field(fail_fast=True),
    AfterValidator(_distinct),
    BeforeValidator(shallow),
    BeforeValidator(_few),
]


class ToolChoice(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _has_its_name(self) -> ToolChoice:
        if self.type == "tool" and self.name is None:
            raise ValueError('of type "tool" needs `name`')
        return self


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools of one request, sorted by where the prompt describes them."""

    shown: list[dict[str, Any]] = field(default_factory=list)  # at its beginning
    deferred: dict[str, dict[str, Any]] = field(default_factory=dict)  # where they are loaded
    ignored: list[str] = field(default_factory=list)  # nowhere: they are Anthropic's own
    names: set[str] = field(default_factory=set)  # of those shown and deferred

    @classmethod
    def of(cls, tools: Sequence[Tool] | None) -> Toolbox:
        box = cls()
        for tool in tools or ():
            if not tool.is_ours:
                box.ignored.append(tool.name or tool.type or "")
                continue
            described = tool.described()
            name = described["function"]["name"]
            box.names.add(name)
            if tool.defer_loading:
                box.deferred[name] = described
            else:
                box.shown.append(described)
        return box

    def tool_use(self, choice: ToolChoice | None) -> ToolUse:
        """The choice as the runtime takes it; one for a tool that is ignored is no choice."""
        if choice is None:
            return ToolUse()
        parallel = not choice.disable_parallel_tool_use
        match choice.type:
            case "none":
                return ToolUse(choice="none")
            case "any" if self.names:
                return ToolUse(choice="required", parallel=parallel)
            case "tool" if choice.name in self.names:
                return ToolUse(choice="required", name=choice.name, parallel=parallel)
            case "any" | "tool" if not self.ignored:
                raise BadRequest(_missing(choice), param="tool_choice")
        return ToolUse(parallel=parallel)


def _missing(choice: ToolChoice) -> str:
    if choice.name is None:
        return '`tool_choice` "any" needs `tools`.'
    return f"`tool_choice` names the tool {choice.name!r}, which is not among `tools`."
