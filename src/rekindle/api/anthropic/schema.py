"""Requests as Anthropic's clients send them: known fields are checked, unknown ones ignored, as
those of beta features are that do not exist here."""

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

from rekindle.api.anthropic.blocks import (
    CacheControl,
    Content,
    SystemContent,
    ThinkingBlock,
    ToolUseBlock,
    as_blocks,
)
from rekindle.api.base.fields import (
    MOST_STOPS,
    MOST_TOKENS,
    WHOLE,
    Normalise,
    StopText,
    ToolName,
    bounded_text,
    shallow,
)
from rekindle.api.base.messages import MOST_MESSAGES, bounded
from rekindle.errors import BadRequest
from rekindle.protocol.requests import StructuredOutput, ToolUse

# ----------------------------------------------------------------------
# Tools in Anthropic's form: those that a reply may call, and which of them it has to.

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


MOST_NAME_CHARACTERS = 4096
FORMAT = "output_config.format"


class _Object(BaseModel):
    model_config = ConfigDict(strict=True, protected_namespaces=())


class InputMessage(_Object):
    role: Literal["user", "assistant", "system"]
    content: Content

    @property
    def blocks(self) -> list[Any]:
        return as_blocks(self.content)


class Thinking(_Object):
    type: Literal["enabled", "adaptive", "disabled", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS), WHOLE] | None = None
    display: str | None = Field(None, max_length=32)


class JsonFormat(_Object):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], BeforeValidator(shallow)] = Field(alias="schema")


class OutputConfig(_Object):
    effort: str | None = Field(None, max_length=32)
    format: JsonFormat | None = None


class Metadata(_Object):
    user_id: str | None = Field(None, max_length=MOST_NAME_CHARACTERS)


class Diagnostics(_Object):
    previous_message_id: str | None = Field(None, max_length=256)


class PromptFields(_Object):
    """What a prompt is made of."""

    model: str | None = None
    messages: Annotated[
        list[InputMessage], Field(fail_fast=True, min_length=1), BeforeValidator(bounded)
    ] = Field(max_length=MOST_MESSAGES)
    system: Annotated[SystemContent, BeforeValidator(bounded_text)] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = Field(None, description="An older place of the format")
    normalise: Normalise | None = Field(
        None, description="Whether volatile parts are taken out, or which"
    )

    @property
    def structure(self) -> StructuredOutput | None:
        asked = (self.output_config and self.output_config.format) or self.output_format
        return StructuredOutput(schema=asked.schema_, param=FORMAT) if asked else None

    @property
    def continues_reply(self) -> bool:
        """Whether the last message is the beginning of the reply, which is to go on."""
        last = self.messages[-1]
        blocks = last.blocks
        ended = any(isinstance(block, ToolUseBlock | ThinkingBlock) for block in blocks)
        return last.role == "assistant" and bool(blocks) and not ended


class CountTokensRequest(PromptFields):
    """POST /v1/messages/count_tokens."""


class MessagesRequest(PromptFields):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS), WHOLE]
    stop_sequences: Annotated[list[StopText], Field(max_length=MOST_STOPS)] | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: Annotated[int, Field(ge=0, le=MOST_TOKENS), WHOLE] | None = None
    metadata: Metadata | None = None
    cache_control: CacheControl | None = None
    diagnostics: Diagnostics | None = None

    @model_validator(mode="after")
    def _call_and_format_agree(self) -> MessagesRequest:
        forced = self.tool_choice is not None and self.tool_choice.type in ("any", "tool")
        if self.structure and forced and self.tools:
            raise BadRequest(
                f"`{FORMAT}` says what the text has to be, and `tool_choice` asks for a call and "
                "no text: leave one of them out.",
                param="output_config",
            )
        return self
