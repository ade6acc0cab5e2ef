"""Builds the turn of a Messages request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rekindle.api.anthropic.caching import LIFETIMES_S, lifetime_of
from rekindle.api.anthropic.conversation import loaded_tools, messages_of
from rekindle.api.anthropic.schema import (
    MessagesRequest,
    PromptFields,
    ThreadContinue,
    Toolbox,
)
from rekindle.api.base.documents import STORED_S
from rekindle.api.base.messages import Message
from rekindle.api.base.request import EFFORTS, RenderedChat, RequestBuilder, or_default, short_name
from rekindle.config import Config
from rekindle.protocol.requests import GenerateRequest, Names


@dataclass(frozen=True, slots=True)
class Conversation:
    """A request's messages and tools as templates read them."""

    messages: list[Message]
    toolbox: Toolbox
    loaded: list[dict[str, Any]]  # tools that the messages describe

    @classmethod
    def of(cls, body: PromptFields) -> Conversation:
        toolbox = Toolbox(body.tools)
        return cls(messages_of(body, toolbox), toolbox, loaded_tools(body, toolbox))


def generate_request(
    body: MessagesRequest,
    conversation: Conversation,
    chat: RenderedChat,
    builder: RequestBuilder,
    message_id: str,
) -> GenerateRequest:
    """`message_id` is the id of the reply."""
    return builder.build(
        **prompt_fields(body, conversation, chat, builder.config),
        loaded_tools=conversation.loaded,
        tool_use=conversation.toolbox.tool_use(body.tool_choice),
        structured_output=body.structure,
        sampling=body.sampling_params(builder.config),
        max_tokens=body.max_tokens,
        stop=body.stop_sequences or [],
        names=_names(body, message_id),
        use_cache=body.use_kv_cache,
        exact=body.cache_exact,
        progress=bool(body.stream),
    )


def prompt_fields(
    body: PromptFields, conversation: Conversation, chat: RenderedChat, config: Config
) -> dict[str, Any]:
    continues = body.continues_reply
    return {
        **chat.fields,
        "tools": conversation.toolbox.shown or None,
        "template_kwargs": _template_kwargs(body),
        "add_generation_prompt": not continues,
        "continue_final_message": continues,
        "normalise": or_default(body.normalise, config.normalise),
    }


def _template_kwargs(body: PromptFields) -> dict[str, Any]:
    """Set only what the client sets, so that the prompt equals that of other dialects."""
    kwargs: dict[str, Any] = {}
    if thinking := body.thinking:
        kwargs["enable_thinking"] = thinking.type != "disabled"
        if thinking.budget_tokens is not None:
            kwargs["thinking_budget"] = thinking.budget_tokens
    if effort := body.output_config and body.output_config.effort:
        kwargs["reasoning_effort"] = EFFORTS.get(effort, effort)
    return kwargs


def _names(body: MessagesRequest, message_id: str) -> Names:
    """Name the reply only if the client asks for a thread or for diagnostics: a named entry
    outlives others."""
    user = body.metadata.user_id if body.metadata else None
    asked = body.diagnostics
    previous = asked.previous_message_id if asked else None
    lifetime = lifetime_of(body)
    thread = body.thread
    return Names(
        cache_key=thread.previous_message_id if isinstance(thread, ThreadContinue) else None,
        entry_key=message_id if thread else None,
        ttl_s=STORED_S if thread else None,
        pin_s=LIFETIMES_S[lifetime] if lifetime else None,
        message_ids=[previous] if previous else [],
        message_id=message_id if asked else None,
        prompt_cache_key=short_name(user) if user else None,
    )
