"""Requests as Anthropic's clients send them: known fields are checked, unknown ones ignored, as
those of beta features are that do not exist here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from rekindle.api.anthropic.blocks import (
    CacheControl,
    Content,
    SystemContent,
    ThinkingBlock,
    ToolUseBlock,
    as_blocks,
)
from rekindle.api.anthropic.tools import ToolChoice, Tools
from rekindle.api.fields import (
    MOST_STOPS,
    MOST_TOKENS,
    WHOLE,
    Normalise,
    StopText,
    bounded_text,
    shallow,
)
from rekindle.api.message import MOST_MESSAGES, bounded
from rekindle.errors import BadRequest
from rekindle.protocol.requests import StructuredOutput

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
