"""Builds the turns of OpenAI's chat and text completions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rekindle.api.base.fields import NO_LIMIT, stop_list
from rekindle.api.base.request import RenderedChat, RequestBuilder, or_default, retention
from rekindle.api.base.tools import described
from rekindle.api.openai.schema import ChatRequest, CompletionRequest, CompletionsBase
from rekindle.config import Config
from rekindle.errors import BadRequest
from rekindle.protocol.requests import Choice, GenerateRequest, Names


def chat_requests(
    body: ChatRequest, builder: RequestBuilder, chat: RenderedChat
) -> list[GenerateRequest]:
    """Build one request, with a turn for each choice."""
    config, selection = builder.config, body.selection
    tools = [tool for tool in body.tools or () if selection.shows(tool.function.name)]
    conversation = {
        **chat.fields,
        "template_kwargs": _template_kwargs(body),
        **_prompt_end(body, config),
        "tools": described(tools),
        "tool_use": selection.tool_use(parallel=body.parallel_tool_calls),
        "progress": body.progress is not None,
    }
    max_tokens = _limit(body.max_completion_tokens or body.max_tokens, config.max_tokens)
    top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return [_request(body, builder, max_tokens, top_logprobs, conversation)]


def completion_requests(body: CompletionRequest, builder: RequestBuilder) -> list[GenerateRequest]:
    """Build one request for each prompt, with a turn for each choice."""
    prompts = body.prompts
    if len(prompts) > 1:
        builder = replace(builder, session=None)  # a session is one conversation
    max_tokens = _limit(body.max_tokens, builder.config.completion_max_tokens)
    return [
        _request(body, builder, max_tokens, body.logprobs, {"prompt": prompt}) for prompt in prompts
    ]


def _request(
    body: CompletionsBase,
    builder: RequestBuilder,
    max_tokens: int | None,
    top_logprobs: int | None,
    prompt: dict[str, Any],
) -> GenerateRequest:
    if max_tokens is not None and (body.min_tokens or 0) > max_tokens:
        raise BadRequest(
            f"`min_tokens` is {body.min_tokens}, but the reply may have at most {max_tokens} "
            "tokens: raise `max_tokens` or send less.",
            param="min_tokens",
        )
    return builder.build(
        **prompt,
        sampling=body.sampling_params(builder.config, top_logprobs),
        max_tokens=max_tokens,
        stop=stop_list(body.stop),
        stop_token_ids=body.stop_token_ids or [],
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        priority=body.priority or 0,
        normalise=body.normalise,
        ignore_eos=bool(body.ignore_eos),
        structured_output=body.structure,
        use_cache=body.use_kv_cache,
        names=_names(body, builder.config),
        more_choices=[_choice(body, number) for number in range(1, body.n or 1)],
        exact=body.cache_exact,
        kv_bits=body.kv_bits,
        kv_group_size=body.kv_group_size,
        kv_quantization_start=body.kv_quantization_start,
    )


def _choice(body: CompletionsBase, number: int) -> Choice:
    """A further choice. Seeds are consecutive, because with equal seeds all choices were equal."""
    names = Names(**_lifetime(body))
    return Choice(
        seed=None if body.seed is None else body.seed + number,
        names=None if names == Names() else names,
    )


def _template_kwargs(body: ChatRequest) -> dict[str, Any]:
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    return kwargs


def _prompt_end(body: ChatRequest, config: Config) -> dict[str, bool]:
    """Whether the prompt ends with the start of a new reply or continues the last message."""
    continues = body.continue_final_message
    if continues is None and body.add_generation_prompt is None:
        continues = config.prefill_assistant and body.ends_with_reply
    begins = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    return {"continue_final_message": bool(continues), "add_generation_prompt": begins}


def _lifetime(body: CompletionsBase) -> dict[str, Any]:
    """The fields of `Names` that apply to every choice. All others name the first one's state."""
    wants_message_id = isinstance(body, ChatRequest) and bool(body.use_kv_cache)
    return {"wants_message_id": wants_message_id, **retention(body.prompt_cache_retention)}


def _names(body: CompletionsBase, config: Config) -> Names:
    chat = body if isinstance(body, ChatRequest) else None
    return Names(
        **_lifetime(body),
        cache_key=body.cache_key,
        return_cache_key=bool(body.return_cache_key),
        session_id=body.session_id,
        session_number=body.kv_cache_session_id,
        message_ids=chat.message_ids if chat else [],
        prompt_cache_key=body.prompt_cache_key,
        by_fingerprint=bool(chat and config.force_cache and not chat.names_state),
    )


def _limit(requested: int | None, default: int | None) -> int | None:
    """None means: until the model stops or the context is full."""
    return None if requested == NO_LIMIT else or_default(requested, default)
