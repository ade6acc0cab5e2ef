"""Validates the functions that a reply may call, and which of them a request allows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from rekindle.api.base.custom_tools import MAX_GRAMMAR_CHARACTERS, check_grammars, custom_function
from rekindle.api.base.fields import FunctionName, StrictModel, at_most, limit_depth
from rekindle.errors import BadRequest
from rekindle.protocol.requests import StructuredOutput, ToolUse


class Function(BaseModel):
    """What the template reads of a function. Unknown fields are passed on."""

    model_config = ConfigDict(strict=True, extra="allow")

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None


class Tool(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["function"]
    function: Function

    @property
    def name(self) -> str:
        return self.function.name

    def described(self) -> dict[str, Any]:
        """What the template reads: without nulls, except those inside a function's schema."""
        return self.model_dump(exclude_none=True)


class Grammar(StrictModel):
    syntax: Literal["lark", "regex"]
    definition: str = Field(max_length=MAX_GRAMMAR_CHARACTERS)


class InputFormat(StrictModel):
    type: Literal["text", "grammar"]
    grammar: Grammar | None = None

    @model_validator(mode="after")
    def _has_its_grammar(self) -> InputFormat:
        if (self.type == "grammar") != (self.grammar is not None):
            raise ValueError('takes a `grammar` if its type is "grammar", and only then')
        return self


class Custom(StrictModel):
    name: FunctionName
    description: str | None = None
    format: InputFormat | None = None


class CustomTool(StrictModel):
    """A tool that takes free text. The model sees a function with one text argument."""

    type: Literal["custom"]
    custom: Custom

    @property
    def name(self) -> str:
        return self.custom.name

    @property
    def grammar(self) -> Grammar | None:
        return self.custom.format.grammar if self.custom.format else None

    @property
    def is_enforced(self) -> bool:
        """Whether sampling enforces the grammar, if there is one."""
        return self.grammar is None or self.grammar.syntax == "regex"

    def described(self) -> dict[str, Any]:
        grammar = self.grammar.definition if self.grammar else None
        described = custom_function(self.custom.description, grammar, is_enforced=self.is_enforced)
        return {"type": "function", "function": {"name": self.name, **described}}


def refuse_duplicates(names: Iterable[str | None], what: str) -> None:
    seen: set[str] = set()
    for name in filter(None, names):
        if name in seen:
            raise ValueError(f"has more than one {what} called {name!r}")
        seen.add(name)


AnyTool = TypeVar("AnyTool", bound=Tool | CustomTool)


def _distinct(tools: list[AnyTool]) -> list[AnyTool]:
    refuse_duplicates((tool.name for tool in tools), "function")
    return tools


class _Typed(StrictModel):
    type: Literal["function", "custom"]


def _by_type(tool: Any, _union: ValidatorFunctionWrapHandler) -> Tool | CustomTool:
    """Validate by the tool's type, so that an error does not list the faults of other types."""
    if isinstance(tool, Tool | CustomTool):
        return tool
    kind = _Typed.model_validate(tool).type
    return (CustomTool if kind == "custom" else Tool).model_validate(tool)


def _limit_grammars(tools: list[Tool | CustomTool]) -> list[Tool | CustomTool]:
    grammars = (tool.grammar for tool in tools if isinstance(tool, CustomTool))
    check_grammars(each.definition for each in grammars if each is not None)
    return tools


MAX_TOOLS = 128
MAX_REQUIRED_CALLS = 8  # in one reply that has to call
Tools = Annotated[
    list[Tool],
    Field(fail_fast=True),
    AfterValidator(_distinct),
    BeforeValidator(limit_depth),
    at_most(MAX_TOOLS),
]
#: The tools of OpenAI's chat, which may be custom ones.
ChatTools = Annotated[
    list[Annotated[Tool | CustomTool, WrapValidator(_by_type)]],
    Field(fail_fast=True),
    AfterValidator(_limit_grammars),
    AfterValidator(_distinct),
    BeforeValidator(limit_depth),
    at_most(MAX_TOOLS),
]


def described(tools: Sequence[Tool | CustomTool] | None) -> list[dict[str, Any]] | None:
    return [tool.described() for tool in tools or ()] or None


@dataclass(frozen=True, slots=True)
class ToolSelection:
    """`tool_choice` of any dialect: which functions a reply may call, and whether it must."""

    choice: Literal["none", "auto", "required"] = "auto"
    names: frozenset[str] | None = None  # None: all

    @property
    def _forced(self) -> str | None:
        """The function that the reply must call, if that leaves only one."""
        names = tuple(self.names or ())
        return names[0] if self.choice == "required" and len(names) == 1 else None

    def tool_use(self, *, parallel: bool | None, max_calls: int | None = None) -> ToolUse:
        """`parallel` is whether the client asks for several calls; None: it does not say.

        A reply that has to call ends after one call, unless the client asks for more. Otherwise
        small models would repeat the call until the reply is full.
        """
        is_required = self.choice == "required"
        if is_required and parallel:
            max_calls = min(max_calls or MAX_REQUIRED_CALLS, MAX_REQUIRED_CALLS)
        return ToolUse(
            choice=self.choice,
            name=self._forced,
            parallel=not is_required if parallel is None else parallel,
            max_calls=max_calls,
        )

    def shows(self, name: str) -> bool:
        """Whether the prompt describes a function.

        Functions that are not allowed are left out, which changes the prompt. A single function
        that must be called is enforced by name instead, so that the prompt stays the same.
        """
        return self.names is None or self._forced is not None or name in self.names

    def check_format(self, output: StructuredOutput | None, param: str) -> None:
        """Refuse a format for the reply's text if the reply must be a call, which has no text."""
        if output and self.choice == "required":
            raise BadRequest(
                f"`{output.param}` constrains the reply's text, but `tool_choice` forces a call, "
                "which has no text: leave one of them out.",
                param=param,
            )
