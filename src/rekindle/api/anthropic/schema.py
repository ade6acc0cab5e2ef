"""Validates Messages requests. Unknown fields, such as those of beta features, are dropped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from rekindle.api.anthropic.blocks import (
    CacheControl,
    ContentBlock,
    TextBlock,
    TextOrBlocks,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    as_blocks,
)
from rekindle.api.base.fields import (
    MAX_ITEMS,
    MAX_STOPS,
    MAX_TOKENS,
    WHOLE,
    Count,
    Id,
    Normalise,
    StopText,
    StrictModel,
    ToolName,
    at_most,
    limit_depth,
    limit_text,
)
from rekindle.api.base.known_fields import (
    COMPLETIONS_ONLY,
    LLAMA_SERVER,
    VLLM,
    FieldTable,
    Ignored,
    KnownFields,
    Refused,
    output_form,
)
from rekindle.api.base.messages import limit_messages
from rekindle.api.base.sampling import SamplingFields
from rekindle.api.base.tools import ToolSelection, refuse_duplicates
from rekindle.errors import BadRequest
from rekindle.protocol.requests import StructuredOutput, ToolUse

FORMAT = "output_config.format"
FIELD_TABLE: FieldTable = {
    **VLLM,
    **LLAMA_SERVER,
    **COMPLETIONS_ONLY,
    **output_form(FORMAT),
    "max_completion_tokens": Refused("use `max_tokens` instead of"),
    "n_predict": Refused("use `max_tokens` instead of"),
    "stop": Refused("use `stop_sequences` instead of", ([],)),
    "logprobs": Refused("the Messages API has no log probabilities: remove", (False,)),
    "mcp_servers": Refused("the server calls no MCP servers: send `tools` instead of", ([],)),
    "container": Ignored("no tool runs on the server"),
    "context_management": Ignored("conversations are used as they are sent", ({},)),
    "service_tier": Ignored("there is one tier"),
    "inference_geo": Ignored("the server is where it is"),
    "speed": Ignored("there is one speed", ("standard",)),
    "betas": Ignored("features are not versioned", ([],)),
    "user_profile_id": Ignored("API keys identify users"),
}


class Tool(StrictModel):
    """A tool of the client's. With a `type` like "web_search_20250305" it is one of Anthropic's,
    which is ignored."""

    name: ToolName | None = None
    type: str | None = Field(None, max_length=128)
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    cache_control: CacheControl | None = Field(None, exclude=True)

    @model_validator(mode="after")
    def _is_defined(self) -> Tool:
        for name in ("name", "input_schema") if self.is_clients else ():
            if getattr(self, name) is None:
                raise ValueError(f"needs `{name}`, as every tool of a client does")
        return self

    @property
    def is_clients(self) -> bool:
        return self.type in (None, "custom")

    def described(self) -> dict[str, Any]:
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.input_schema,
            "strict": self.strict,
        }
        known = {key: value for key, value in function.items() if value is not None}
        return {"type": "function", "function": known}


def _distinct(tools: list[Tool]) -> list[Tool]:
    refuse_duplicates((tool.name for tool in tools), "tool")
    return tools


Tools = Annotated[
    list[Tool],
    Field(fail_fast=True),
    AfterValidator(_distinct),
    BeforeValidator(limit_depth),
    at_most(1024),
]


class ToolChoice(StrictModel):
    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _has_its_name(self) -> ToolChoice:
        if self.type == "tool" and self.name is None:
            raise ValueError('of type "tool" needs `name`')
        return self


class Toolbox:
    """The tools of one request, by where the prompt describes them."""

    def __init__(self, tools: Sequence[Tool] | None) -> None:
        self.shown: list[dict[str, Any]] = []  # shown at the beginning of the prompt
        self.deferred: dict[str, dict[str, Any]] = {}  # shown where a message first names them
        self.ignored: list[str] = []  # left out, because they run on Anthropic's servers
        self.names: set[str] = set()  # of the shown and the deferred tools
        for tool in tools or ():
            if not tool.is_clients:
                self.ignored.append(tool.name or tool.type or "")
                continue
            described = tool.described()
            name = described["function"]["name"]
            self.names.add(name)
            if tool.defer_loading:
                self.deferred[name] = described
            else:
                self.shown.append(described)

    def tool_use(self, choice: ToolChoice | None) -> ToolUse:
        """Resolve `tool_choice`. A choice of an ignored tool has no effect."""
        if choice is None:
            return ToolUse()
        selection = ToolSelection()
        match choice.type:
            case "none":
                selection = ToolSelection("none")
            case "any" if self.names:
                selection = ToolSelection("required")
            case "tool" if choice.name in self.names:
                selection = ToolSelection("required", frozenset([choice.name]))
            case "any" | "tool" if not self.ignored:
                raise BadRequest(_missing(choice), param="tool_choice")
        disabled = choice.disable_parallel_tool_use
        return selection.tool_use(parallel=None if disabled is None else not disabled)


def _missing(choice: ToolChoice) -> str:
    if choice.name is None:
        return '`tool_choice` "any" needs `tools`.'
    return f"`tool_choice` names the tool {choice.name!r}, which is not among `tools`."


class InputMessage(StrictModel):
    role: Literal["user", "assistant", "system"]
    content: TextOrBlocks[ContentBlock]

    @property
    def blocks(self) -> list[Any]:
        return as_blocks(self.content)


class Thinking(StrictModel):
    type: Literal["enabled", "adaptive", "disabled", "between_tools"]
    budget_tokens: Count | None = None
    display: str | None = Field(None, max_length=32)


class JsonFormat(StrictModel):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], BeforeValidator(limit_depth)] = Field(alias="schema")


class OutputConfig(StrictModel):
    effort: str | None = Field(None, max_length=32)
    format: JsonFormat | None = None


class Metadata(StrictModel):
    user_id: str | None = Field(None, max_length=4096)


class Diagnostics(StrictModel):
    previous_message_id: str | None = Field(None, max_length=256)


class ThreadCreate(StrictModel):
    """Store the conversation under the reply's id."""

    type: Literal["create"]


class ThreadContinue(StrictModel):
    """Continue a stored conversation. `messages` has only the new ones."""

    type: Literal["continue"]
    previous_message_id: Id


class PromptFields(KnownFields, StrictModel):
    """The fields that make up the prompt."""

    field_table: ClassVar[FieldTable] = FIELD_TABLE

    model: str | None = None
    messages: Annotated[
        list[InputMessage], Field(fail_fast=True, min_length=1), BeforeValidator(limit_messages)
    ] = Field(max_length=MAX_ITEMS)
    system: Annotated[TextOrBlocks[TextBlock], BeforeValidator(limit_text)] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = Field(
        None, description="Older name of `output_config.format`"
    )
    normalise: Normalise | None = Field(
        None, description="Whether to remove volatile parts of the prompt, or which ones"
    )

    @property
    def blocks(self) -> Iterator[Any]:
        """The blocks of all messages, each tool result followed by its own blocks."""
        for message in self.messages:
            for block in message.blocks:
                yield block
                if isinstance(block, ToolResultBlock):
                    yield from block.blocks

    @property
    def structure(self) -> StructuredOutput | None:
        asked = (self.output_config and self.output_config.format) or self.output_format
        return StructuredOutput(schema=asked.schema_, param=FORMAT) if asked else None

    @property
    def continues_reply(self) -> bool:
        """Whether the last message is the beginning of the reply."""
        last = self.messages[-1]
        blocks = last.blocks
        ended = any(isinstance(block, ToolUseBlock | ThinkingBlock) for block in blocks)
        return last.role == "assistant" and bool(blocks) and not ended


class CountTokensRequest(PromptFields):
    """POST /v1/messages/count_tokens."""


class MessagesRequest(PromptFields, SamplingFields):
    """POST /v1/messages."""

    max_tokens: Count
    stop_sequences: Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    top_k: Annotated[int, Field(ge=0, le=MAX_TOKENS), WHOLE] | None = None
    metadata: Metadata | None = None
    cache_control: CacheControl | None = None
    use_kv_cache: bool | None = None
    cache_exact: bool | None = None
    diagnostics: Diagnostics | None = None
    thread: Annotated[ThreadCreate | ThreadContinue, Field(discriminator="type")] | None = None

    @model_validator(mode="after")
    def _call_and_format_agree(self) -> MessagesRequest:
        self.check_choice()
        return self

    def check_choice(self) -> None:
        """Refuse a format for the reply's text if the reply must be a call."""
        forced = self.tool_choice is not None and self.tool_choice.type in ("any", "tool")
        if forced and self.tools:
            ToolSelection("required").check_format(self.structure, "output_config")
