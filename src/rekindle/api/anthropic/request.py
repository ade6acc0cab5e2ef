"""From a request of Anthropic's API to the turn that a runtime computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rekindle.api.anthropic.caching import LIFETIMES_S, lifetime_of
from rekindle.api.anthropic.conversation import loaded_tools, messages_of
from rekindle.api.anthropic.schema import MessagesRequest, PromptFields, Toolbox
from rekindle.api.base.images import Illustrated
from rekindle.api.base.messages import Message, rendered
from rekindle.api.base.names import short_name
from rekindle.config import Config
from rekindle.protocol.admin import Tokenize
from rekindle.protocol.requests import GenerateRequest, Names, SamplingParams

#: Degrees of effort that templates do not know, by the nearest that they do.
EFFORTS = {"xhigh": "high", "max": "high"}


@dataclass(frozen=True, slots=True)
class Conversation:
    """A request's messages and tools as templates read them."""

    messages: list[Message]
    toolbox: Toolbox
    loaded: list[dict[str, Any]]  # tools that the messages describe

    @classmethod
    def of(cls, body: PromptFields) -> Conversation:
        toolbox = Toolbox.of(body.tools)
        return cls(messages_of(body, toolbox), toolbox, loaded_tools(body, toolbox))

    def shown(self, illustrated: Illustrated | None) -> dict[str, Any]:
        """The fields of a request to the runtime; `illustrated`: with its pictures."""
        return {
            "messages": illustrated.messages if illustrated else rendered(self.messages),
            "pictures": illustrated.pictures if illustrated else [],
            "tools": self.toolbox.shown or None,
        }


def generate_request(
    body: MessagesRequest,
    conversation: Conversation,
    illustrated: Illustrated | None,
    config: Config,
    salt: bytes,
    message_id: str,
) -> GenerateRequest:
    """The turn that answers with a message of this id."""
    return GenerateRequest(
        turn=0,
        **conversation.shown(illustrated),
        **_prompt_form(body, config),
        loaded_tools=conversation.loaded,
        tool_use=conversation.toolbox.tool_use(body.tool_choice),
        structured_output=body.structure,
        sampling=_sampling(body, config),
        max_tokens=body.max_tokens,
        stop=body.stop_sequences or [],
        reuse=config.context_cache,
        names=_names(body, message_id) if config.context_cache else None,
        exact=config.exact,
        kv_bits=config.kv_bits,
        kv_quantization_start=config.kv_quantization_start,
        salt=salt,
        progress=bool(body.stream),
    )


def token_question(
    body: PromptFields, conversation: Conversation, illustrated: Illustrated | None, config: Config
) -> Tokenize:
    """How many tokens the prompt of such a turn has."""
    return Tokenize(
        **conversation.shown(illustrated), **_prompt_form(body, config), with_tokens=False
    )


def _prompt_form(body: PromptFields, config: Config) -> dict[str, Any]:
    continues = body.continues_reply
    return {
        "template_kwargs": _template_kwargs(body),
        "add_generation_prompt": not continues,
        "continue_final_message": continues,
        "normalise": config.normalise if body.normalise is None else body.normalise,
    }


def _template_kwargs(body: PromptFields) -> dict[str, Any]:
    """Nothing is said where a client says nothing: then the prompt is that of other dialects."""
    kwargs: dict[str, Any] = {}
    if thinking := body.thinking:
        kwargs["enable_thinking"] = thinking.type != "disabled"
        if thinking.budget_tokens is not None:
            kwargs["thinking_budget"] = thinking.budget_tokens
    if effort := body.output_config and body.output_config.effort:
        kwargs["reasoning_effort"] = EFFORTS.get(effort, effort)
    return kwargs


def _sampling(body: MessagesRequest, config: Config) -> SamplingParams:
    return SamplingParams(
        temperature=config.temperature if body.temperature is None else body.temperature,
        top_p=config.top_p if body.top_p is None else body.top_p,
        top_k=body.top_k or 0,
        repetition_penalty=config.repetition_penalty,
        repetition_context_size=config.repetition_context_size,
    )


def _names(body: MessagesRequest, message_id: str) -> Names | None:
    """A reply has a name only for clients that ask about it: an entry with one outlives others."""
    user = body.metadata.user_id if body.metadata else None
    asked = body.diagnostics
    previous = asked.previous_message_id if asked else None
    lifetime = lifetime_of(body)
    names = Names(
        pin_s=LIFETIMES_S[lifetime] if lifetime else None,
        message_ids=[previous] if previous else [],
        message_id=message_id if asked else None,
        prompt_cache_key=short_name(user) if user else None,
    )
    return None if names == Names() else names
