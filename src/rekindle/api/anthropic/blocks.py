"""Defines the content blocks of Anthropic's messages and tool results."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field

from rekindle.api.base.fields import MAX_ITEMS, StrictModel, explain_items, limit_depth
from rekindle.errors import Unsupported

#: Blocks of tools that run on Anthropic's servers. They are left out of the prompt.
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


T = TypeVar("T")
Blocks = Annotated[list[T], Field(max_length=MAX_ITEMS, fail_fast=True)]
TextOrBlocks = Annotated[
    str | Blocks[T], explain_items("block", "takes a string, or a list of content blocks")
]
Lifetime = Literal["5m", "1h"]  # of cached state


class CacheControl(StrictModel):
    """Asks to keep the state of everything before it. It does not change the prompt."""

    type: Literal["ephemeral"]
    ttl: Lifetime = "5m"


class Block(StrictModel):
    # A mark applies to one request, so it is not stored with a thread.
    cache_control: CacheControl | None = Field(None, exclude=True)


class TextBlock(Block):
    type: Literal["text"]
    text: str


class Base64Source(StrictModel):
    type: Literal["base64"]
    media_type: str = Field(max_length=64, pattern=r"^[\w.+-]+/[\w.+-]+$")
    data: str

    @property
    def url(self) -> str:
        return f"data:{self.media_type};base64,{self.data}"


class UrlSource(StrictModel):
    type: Literal["url"]
    url: str


class ImageBlock(Block):
    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]


class TextSource(StrictModel):
    type: Literal["text"]
    data: str


class ContentSource(StrictModel):
    type: Literal["content"]
    content: TextOrBlocks[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]]


def _refuse_files(source: Any) -> Any:
    kind = source.get("type") if isinstance(source, dict) else None
    if kind == "file":
        raise Unsupported(
            "uploaded files are not supported: send the document as "
            '`"source": {"type": "base64", "media_type": "application/pdf", "data": …}`',
            param="messages",
        )
    return source


class Citations(StrictModel):
    enabled: bool | None = None


def _refuse_citations(citations: Citations) -> Citations:
    if citations.enabled:
        raise Unsupported(
            "replies have no citations: leave `citations` of documents out", param="messages"
        )
    return citations


class FileBlock(Block):
    """The file of a document, whose text is read later. Clients do not send this block."""

    type: Literal["file"]
    url: str


class DocumentBlock(Block):
    """A document: a PDF, plain text, or blocks of text and images."""

    type: Literal["document"]
    source: Annotated[
        TextSource | ContentSource | Base64Source | UrlSource,
        Field(discriminator="type"),
        BeforeValidator(_refuse_files),
    ]
    title: str | None = None
    context: str | None = None
    citations: Annotated[Citations, AfterValidator(_refuse_citations)] | None = None

    @property
    def parts(self) -> list[Any]:
        """Its title, its context and its content, as blocks."""
        texts = filter(None, [self.title, self.context])
        before = [block for text in texts for block in as_blocks(text)]
        match self.source:
            case TextSource(data=content) | ContentSource(content=content):
                return [*before, *as_blocks(content)]
            case source:
                return [*before, FileBlock.model_construct(type="file", url=source.url)]


class SearchResultBlock(Block):
    type: Literal["search_result"]
    source: str
    title: str
    content: Blocks[TextBlock]


class ToolReferenceBlock(Block):
    """Loads a deferred tool. The prompt describes the tool in the place of this block."""

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
    input: Annotated[dict[str, Any], AfterValidator(limit_depth)]


class UnservedBlock(Block):
    """Left out of the prompt."""

    type: ServerBlock


InputBlock = TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock
ResultBlock = Annotated[InputBlock | UnservedBlock, Field(discriminator="type")]


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: TextOrBlocks[ResultBlock] | None = None
    is_error: bool | None = None

    @property
    def blocks(self) -> list[Any]:
        return as_blocks(self.content)


ContentBlock = Annotated[
    InputBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | UnservedBlock,
    Field(discriminator="type"),
]


def as_blocks(content: Any) -> list[Any]:
    """Convert content to a list. A string is one block of text; an empty string has no block."""
    if isinstance(content, str):
        return [TextBlock.model_construct(type="text", text=content)] if content else []
    return content or []
