"""Blocks of content in Anthropic's form, as messages and results of tools hold them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from rekindle.api.base.fields import fault_among, shallow

MOST_BLOCKS = 20_000
#: What tools of Anthropic's own servers leave in a conversation; there is no such tool here.
ServerBlock = Literal[
    "server_tool_use",
    "web_search_tool_result",
    "web_fetch_tool_result",
    "code_execution_tool_result",
    "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result",
    "tool_search_tool_result",
    "mcp_tool_use",
    "mcp_tool_result",
    "container_upload",
    "browser_state",
    "compaction",
]


class CacheControl(BaseModel):
    """How long what comes before a mark is to be kept. It never touches the prompt."""

    model_config = ConfigDict(strict=True)

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


class Block(BaseModel):
    model_config = ConfigDict(strict=True)

    cache_control: CacheControl | None = None


class TextBlock(Block):
    type: Literal["text"]
    text: str


class Base64Source(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["base64"]
    media_type: str = Field(max_length=64, pattern=r"^[\w.+-]+/[\w.+-]+$")
    data: str

    @property
    def url(self) -> str:
        return f"data:{self.media_type};base64,{self.data}"


class UrlSource(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["url"]
    url: str


class ImageBlock(Block):
    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]


class TextSource(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["text"]
    data: str


class DocumentBlock(Block):
    """A document of plain text; PDF files are not read."""

    type: Literal["document"]
    source: TextSource
    title: str | None = None


class SearchResultBlock(Block):
    type: Literal["search_result"]
    source: str
    title: str
    content: Annotated[list[TextBlock], Field(max_length=MOST_BLOCKS, fail_fast=True)]


class ToolReferenceBlock(Block):
    """Loads a tool that was deferred: it is described where this block stands."""

    type: Literal["tool_reference"]
    tool_name: str


class ThinkingBlock(Block):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(Block):
    type: Literal["redacted_thinking"]
    data: str = ""


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: str
    name: str
    input: Annotated[dict[str, Any], AfterValidator(shallow)]


class UnservedBlock(Block):
    """Left out of the prompt."""

    type: ServerBlock


def _explained(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """One sentence about the first block that is wrong, or about what content takes."""
    try:
        return handler(value)
    except ValidationError as error:
        takes = "takes a string, or a list of content blocks"
        raise ValueError(fault_among(error, "block", takes)) from None


ResultBlock = Annotated[
    TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock | UnservedBlock,
    Field(discriminator="type"),
]
ResultContent = Annotated[
    str | Annotated[list[ResultBlock], Field(max_length=MOST_BLOCKS, fail_fast=True)],
    WrapValidator(_explained),
]


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: ResultContent | None = None
    is_error: bool | None = None

    @property
    def blocks(self) -> list[Any]:
        return as_blocks(self.content)


ContentBlock = Annotated[
    TextBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
    | ToolReferenceBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | UnservedBlock,
    Field(discriminator="type"),
]
Content = Annotated[
    str | Annotated[list[ContentBlock], Field(max_length=MOST_BLOCKS, fail_fast=True)],
    WrapValidator(_explained),
]
SystemContent = Annotated[
    str | Annotated[list[TextBlock], Field(max_length=MOST_BLOCKS, fail_fast=True)],
    WrapValidator(_explained),
]


def as_blocks(content: Any) -> list[Any]:
    """Content as a list: a string is one block of text, and an empty one none."""
    if isinstance(content, str):
        return [TextBlock.model_construct(type="text", text=content)] if content else []
    return content or []
