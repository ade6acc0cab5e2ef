"""Validates the functions that a reply may call, and which of them a request allows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from rekindle.api.base.fields import FunctionName, at_most, limit_depth
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


def refuse_duplicates(names: Iterable[str | None], what: str) -> None:
    seen: set[str] = set()
    for name in filter(None, names):
        if name in seen:
            raise ValueError(f"has more than one {what} called {name!r}")
        seen.add(name)


def _distinct(tools: list[Tool]) -> list[Tool]:
    refuse_duplicates((tool.function.name for tool in tools), "function")
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


def described(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    """What the template reads: without nulls, except those inside a function's schema."""
    return [tool.model_dump(exclude_none=True) for tool in tools or ()] or None


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

        A reply that has to call ends after one call, unless the client asks for more: nothing else
        would end it, and small models repeat the call.
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
