"""From a request of OpenAI's API to the turns that a runtime computes."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from rekindle.api.base.fields import NO_LIMIT
from rekindle.api.base.images import Illustrated
from rekindle.api.base.messages import rendered
from rekindle.api.base.tools import described
from rekindle.api.openai import constraints as tool_choice
from rekindle.api.openai.schema import ChatRequest, CompletionRequest, RequestBase
from rekindle.config import Config
from rekindle.protocol.requests import Choice, GenerateRequest, Names, SamplingParams

DAY_S = 86_400.0


def chat_requests(
    body: ChatRequest, config: Config, salt: bytes, illustrated: Illustrated | None = None
) -> list[GenerateRequest]:
    """One request, with a turn for each choice; `illustrated` are its messages with pictures."""
    conversation = {
        "messages": illustrated.messages if illustrated else rendered(body.messages),
        "pictures": illustrated.pictures if illustrated else [],
        "template_kwargs": _template_kwargs(body),
        **_prompt_end(body, config),
        "tools": described(tool_choice.offered(body.tool_choice, body.tools)),
        "tool_use": tool_choice.tool_use(
            body.tool_choice, parallel=body.parallel_tool_calls is not False
        ),
        "progress": body.progress is not None,
    }
    return _requests(
        body,
        config,
        salt,
        [conversation],
        max_tokens=_limit(body.max_completion_tokens or body.max_tokens, config.max_tokens),
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )


def completion_requests(
    body: CompletionRequest, config: Config, salt: bytes
) -> list[GenerateRequest]:
    """One request for each prompt, with a turn for each choice."""
    return _requests(
        body,
        config,
        salt,
        [{"prompt": prompt} for prompt in body.prompts],
        max_tokens=_limit(body.max_tokens, config.completion_max_tokens),
        top_logprobs=body.logprobs,
    )


def _requests(
    body: RequestBase,
    config: Config,
    salt: bytes,
    inputs: list[dict[str, Any]],
    *,
    max_tokens: int | None,
    top_logprobs: int | None,
) -> list[GenerateRequest]:
    sampling = _sampling(body, config, top_logprobs=top_logprobs)
    reuse = config.context_cache and body.use_kv_cache is not False
    more_choices = [
        Choice(
            seed=_seed(sampling.seed, choice),
            names=_names(body, config, choice) if reuse else None,
        )
        for choice in range(1, body.n or 1)
    ]
    return [
        GenerateRequest(
            turn=0,
            **each,
            sampling=sampling,
            max_tokens=max_tokens,
            stop=body.stops,
            priority=body.priority or 0,
            normalise=_or(body.normalise, config.normalise),
            ignore_eos=bool(body.ignore_eos),
            structured_output=body.structure,
            reuse=reuse,
            names=_names(body, config, 0) if reuse else None,
            more_choices=more_choices,
            exact=_or(body.cache_exact, config.exact),
            kv_bits=_or(body.kv_bits, config.kv_bits),
            kv_group_size=body.kv_group_size,
            kv_quantization_start=_or(body.kv_start, config.kv_quantization_start),
            salt=salt,
        )
        for each in inputs
    ]


def _template_kwargs(body: ChatRequest) -> dict[str, Any]:
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    return kwargs


def _prompt_end(body: ChatRequest, config: Config) -> dict[str, bool]:
    """How the prompt ends: with the beginning of a reply, or in the middle of one."""
    continues = body.continue_final_message
    if continues is None and body.add_generation_prompt is None:
        continues = config.prefill_assistant and body.ends_with_reply
    begins = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    return {"continue_final_message": bool(continues), "add_generation_prompt": begins}


def _sampling(body: RequestBase, config: Config, *, top_logprobs: int | None) -> SamplingParams:
    return SamplingParams(
        temperature=_or(body.temperature, config.temperature),
        top_p=_or(body.top_p, config.top_p),
        top_k=max(body.top_k or 0, 0),
        min_p=body.min_p or 0.0,
        repetition_penalty=_or(body.repetition_penalty, config.repetition_penalty),
        repetition_context_size=_or(body.repetition_context_size, config.repetition_context_size),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias={int(token): bias for token, bias in (body.logit_bias or {}).items()},
        seed=body.seed,
        top_logprobs=top_logprobs,
    )


def _seed(seed: int | None, choice: int) -> int | None:
    """Choices of one seed get consecutive seeds, or they would all be equal."""
    return None if seed is None else seed + choice


def _names(body: RequestBase, config: Config, choice: int) -> Names | None:
    """The first choice has the request's names; how long state is kept applies to all."""
    unnamed = Names(
        wants_message_id=isinstance(body, ChatRequest) and bool(body.use_kv_cache),
        ttl_s=DAY_S if body.prompt_cache_retention == "24h" else None,
        in_memory=body.prompt_cache_retention in ("in_memory", "in-memory"),
    )
    names = unnamed if choice else _named(unnamed, body, config)
    return None if names == Names() else names


def _named(unnamed: Names, body: RequestBase, config: Config) -> Names:
    chat = body if isinstance(body, ChatRequest) else None
    return structs.replace(
        unnamed,
        cache_key=body.cache_key,
        return_cache_key=bool(body.return_cache_key),
        session_id=body.session_id,
        session_number=body.kv_cache_session_id,
        message_ids=chat.message_ids if chat else [],
        prompt_cache_key=body.prompt_cache_key,
        by_fingerprint=bool(chat and config.force_cache and not chat.names_state),
    )


def _limit(requested: int | None, default: int | None) -> int | None:
    """None: until the model stops or the context ends."""
    return None if requested == NO_LIMIT else _or(requested, default)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
