"""Builds the turns of OpenAI's chat and text completions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rekindle.api.base.completions import build_request, token_limit
from rekindle.api.base.request import RenderedChat, RequestBuilder
from rekindle.api.base.tools import described
from rekindle.api.openai.schema import ChatRequest, CompletionRequest
from rekindle.config import Config
from rekindle.protocol.requests import GenerateRequest, Infill


def chat_requests(
    body: ChatRequest, builder: RequestBuilder, chat: RenderedChat
) -> list[GenerateRequest]:
    """Build one request, with a turn for each choice."""
    config, selection = builder.config, body.selection
    tools = [tool for tool in body.tools or () if selection.shows(tool.name)]
    conversation = {
        **chat.fields,
        "template_kwargs": _template_kwargs(body),
        **_prompt_end(body, config),
        "tools": described(tools),
        "tool_use": selection.tool_use(parallel=body.parallel_tool_calls),
    }
    max_tokens = token_limit(body.max_completion_tokens or body.max_tokens, config.max_tokens)
    top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return [build_request(body, builder, max_tokens, top_logprobs, conversation)]


def completion_requests(body: CompletionRequest, builder: RequestBuilder) -> list[GenerateRequest]:
    """Build one request for each prompt, with a turn for each choice."""
    prompts = body.prompts
    if len(prompts) > 1:
        builder = replace(builder, session=None)  # a session is one conversation
    max_tokens = token_limit(body.max_tokens, builder.config.completion_max_tokens)
    is_ranked = body.choices > (body.n or 1)
    top_logprobs = 0 if is_ranked and body.logprobs is None else body.logprobs
    return [
        build_request(body, builder, max_tokens, top_logprobs, _text_prompt(body, prompt))
        for prompt in body.prompts
    ]


def _text_prompt(body: CompletionRequest, prompt: str | list[int]) -> dict[str, Any]:
    fields: dict[str, Any] = {"returns_prompt": bool(body.echo or body.verbose)}
    if body.suffix:
        assert isinstance(prompt, str), "the schema has checked it"
        return {**fields, "prompt": "", "infill": Infill(prefix=prompt, suffix=body.suffix)}
    return {**fields, "prompt": prompt}


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
