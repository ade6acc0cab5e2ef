"""Validates the tools of the Responses API and presents them to the model as functions.

The name of a tool in a namespace starts with the namespace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
)

from rekindle.api.base.custom_tools import MAX_GRAMMAR_CHARACTERS, check_grammars, custom_function
from rekindle.api.base.fields import ToolName, limit_depth
from rekindle.api.base.tools import ToolSelection
from rekindle.errors import BadRequest

MAX_TOOLS = 1024  # in all namespaces together
SEPARATOR = "__"  # between a namespace and a name


class Form(BaseModel):
    """Passes unknown fields on, because the response shows them."""

    model_config = ConfigDict(strict=True, extra="allow")


class FunctionTool(Form):
    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def described(self) -> dict[str, Any]:
        """What templates read, without the name."""
        described = {
            "description": self.description or None,
            "parameters": self.parameters,
            "strict": self.strict,
        }
        return {key: value for key, value in described.items() if value is not None}


class InputFormat(Form):
    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = Field(None, max_length=MAX_GRAMMAR_CHARACTERS)


class CustomTool(Form):
    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: InputFormat | None = None

    @property
    def grammar(self) -> str | None:
        """The grammar of its input, if it has one."""
        form = self.format
        return form.definition if form is not None and form.type == "grammar" else None

    @property
    def is_enforced(self) -> bool:
        """Whether sampling enforces the grammar. Inside of JSON it cannot enforce Lark."""
        return self.grammar is None or (self.format is not None and self.format.syntax == "regex")

    def described(self) -> dict[str, Any]:
        return custom_function(self.description, self.grammar, is_enforced=self.is_enforced)


def _kind(tool: Any) -> str | None:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    if not isinstance(kind, str):
        return None
    return kind if kind in ("function", "custom", "namespace") else "hosted"


InnerTool = Annotated[FunctionTool | CustomTool, Field(discriminator="type")]


class NamespaceTool(Form):
    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: Annotated[list[InnerTool], Field(fail_fast=True)]


class HostedTool(Form):
    """A tool that runs on OpenAI's servers. It is ignored."""

    type: str = Field(max_length=128)


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[HostedTool, Tag("hosted")],
    Discriminator(_kind, custom_error_type="tool_type", custom_error_message="needs a `type`"),
]


def _limit_tools(tools: Any) -> Any:
    """Count tools before they are validated, those in namespaces too."""
    if isinstance(tools, list):
        nested = (tool.get("tools") for tool in tools if isinstance(tool, dict))
        found = len(tools) + sum(len(inner) for inner in nested if isinstance(inner, list))
        if found > MAX_TOOLS:
            raise ValueError(f"takes at most {MAX_TOOLS} items, those of namespaces included")
    return tools


def _limit_grammars(tools: list[Any]) -> list[Any]:
    """Limit the grammars, because compiling one takes time."""
    inner = [each for tool in tools for each in getattr(tool, "tools", [tool])]
    grammars = (tool.grammar or "" for tool in inner if isinstance(tool, CustomTool))
    check_grammars(grammars)
    return tools


Tools = Annotated[
    list[AnyTool],
    Field(fail_fast=True),
    AfterValidator(_limit_grammars),
    BeforeValidator(limit_depth),
    BeforeValidator(_limit_tools),
]


@dataclass(frozen=True, slots=True)
class OfferedTool:
    tool: FunctionTool | CustomTool
    namespace: str | None = None
    introduction: str | None = None  # of the namespace, in its first tool

    @property
    def is_custom(self) -> bool:
        return isinstance(self.tool, CustomTool)

    def described(self) -> dict[str, Any]:
        described = self.tool.described()
        if self.introduction:
            texts = [self.introduction, described.get("description")]
            described["description"] = "\n\n".join(filter(None, texts))
        return described


def full_name(name: str, namespace: str | None) -> str:
    """The name that the model uses."""
    if not namespace:
        return name
    return namespace + ("" if namespace.endswith(SEPARATOR) else SEPARATOR) + name


class Toolbox:
    def __init__(self, tools: Sequence[Any] | None) -> None:
        self.offered: dict[str, OfferedTool] = {}  # by full name
        self.ignored: list[str] = []  # types of tools that run on OpenAI's servers
        self._within: dict[str, list[str]] = {}  # full names, by short name
        for tool in tools or ():
            if isinstance(tool, HostedTool):
                self.ignored.append(tool.type)
            else:
                self._add(tool)

    def _add(self, tool: Any) -> None:
        for each in _offered(tool):
            name = full_name(each.tool.name, each.namespace)
            if name in self.offered:
                raise BadRequest(f"`tools` has more than one called {name!r}.", param="tools")
            self.offered[name] = each
            self._within.setdefault(each.tool.name, []).append(name)

    @property
    def unenforced(self) -> list[str]:
        """Full names of the custom tools whose grammar is not enforced."""
        tools = ((name, each.tool) for name, each in self.offered.items())
        return [
            name for name, tool in tools if isinstance(tool, CustomTool) and not tool.is_enforced
        ]

    def described(self, selection: ToolSelection) -> list[dict[str, Any]]:
        """The tools that the prompt describes, as templates read them."""
        return [
            {"type": "function", "function": {"name": name, **each.described()}}
            for name, each in self.offered.items()
            if selection.shows(name)
        ]

    def resolve(self, name: str, namespace: str | None = None) -> str:
        """Find the full name. Clients may leave out the namespace if the name is unique."""
        full = full_name(name, namespace)
        if namespace or full in self.offered:
            return full
        within = self._within.get(name, [])
        return within[0] if len(within) == 1 else full


def _offered(tool: Any) -> list[OfferedTool]:
    if not isinstance(tool, NamespaceTool):
        return [OfferedTool(tool)]
    introduction = f"{tool.name}: {tool.description}" if tool.description else None
    return [
        OfferedTool(inner, tool.name, None if place else introduction)
        for place, inner in enumerate(tool.tools)
    ]
