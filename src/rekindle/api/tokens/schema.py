"""Requests about tokens, in the shapes of llama.cpp's server and of vLLM's."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from rekindle.api.fields import FreeObject, Tokens, bounded_text
from rekindle.api.message import MOST_MESSAGES, Message, Messages, rendered
from rekindle.api.tools import Tools, described
from rekindle.errors import BadRequest, Unsupported
from rekindle.protocol.tokenisation import Tokenize

Text = Annotated[str, BeforeValidator(bounded_text)]
SOURCES = ("content", "prompt", "messages")


class ConversationBase(BaseModel):
    """What says how a conversation is rendered."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    model: str | None = None
    tools: Tools | None = None
    chat_template_kwargs: FreeObject | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def conversation(self, messages: list[Message], *, normalise: bool) -> Tokenize:
        """What a runtime is asked; `normalise`: as chat normalises conversations."""
        if any(message.media for message in messages):
            raise Unsupported(
                "pictures have no tokens before the model has seen them: send text alone",
                param="messages",
            )
        return Tokenize(
            messages=rendered(messages),
            tools=described(self.tools),
            template_kwargs=self.chat_template_kwargs or {},
            add_generation_prompt=self.add_generation_prompt and not self.continue_final_message,
            continue_final_message=self.continue_final_message,
            normalise=normalise,
        )


class TemplateRequest(ConversationBase):
    messages: Messages = Field(min_length=1, max_length=MOST_MESSAGES)

    def asked(self, *, normalise: bool) -> Tokenize:
        return self.conversation(self.messages, normalise=normalise)


class TokenizeRequest(ConversationBase):
    """One of `content` (llama.cpp), `prompt` (vLLM) and `messages`."""

    content: Text | None = None
    prompt: Text | None = None
    messages: Messages | None = Field(None, min_length=1, max_length=MOST_MESSAGES)
    add_special: bool | None = Field(
        None, description="What the model wants around a text; by default with `prompt` alone"
    )
    add_special_tokens: bool | None = Field(None, description="vLLM's name of `add_special`")
    parse_special: bool = Field(True, description="A control token's text in a text is that token")
    with_pieces: bool = Field(False, description="llama.cpp's form: each token with its text")
    return_token_strs: bool = Field(False, description="vLLM's form: `token_strs` beside `tokens`")

    @model_validator(mode="after")
    def _one_source(self) -> TokenizeRequest:
        given = [name for name in SOURCES if getattr(self, name) is not None]
        if len(given) != 1:
            raise BadRequest(
                "Send one of `content`, `prompt` and `messages`.", param=given[1] if given else None
            )
        return self

    def asked(self, *, normalise: bool) -> Tokenize:
        asked = (
            Tokenize(
                text=self.prompt if self.content is None else self.content,
                add_special=self._adds_special(),
                parse_special=self.parse_special,
            )
            if self.messages is None
            else self.conversation(self.messages, normalise=normalise)
        )
        asked.with_pieces = self.with_pieces or self.return_token_strs
        return asked

    def _adds_special(self) -> bool:
        given = self.add_special if self.add_special is not None else self.add_special_tokens
        return self.prompt is not None if given is None else given


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    model: str | None = None
    tokens: Tokens


class TokenCountRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    model: str | None = None
    text: Text


class TokenCountBody(BaseModel):
    length: int
