"""A request with the server's defaults filled in, in the runtime's words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rekindle.api.openai.naming import naming
from rekindle.api.openai.schema import Request
from rekindle.config import Config
from rekindle.protocol.requests import GenerateRequest, SamplingParams


def sampling(request: Request, config: Config, *, top_logprobs: int | None) -> SamplingParams:
    return SamplingParams(
        temperature=_or(request.temperature, config.temperature),
        top_p=_or(request.top_p, config.top_p),
        top_k=max(request.top_k or 0, 0),
        min_p=request.min_p or 0.0,
        repetition_penalty=_or(request.repetition_penalty, config.repetition_penalty),
        repetition_context_size=_or(
            request.repetition_context_size, config.repetition_context_size
        ),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias={int(token): bias for token, bias in (request.logit_bias or {}).items()},
        seed=request.seed,
        top_logprobs=top_logprobs,
    )


def asks(
    request: Request,
    config: Config,
    salt: bytes,
    inputs: list[dict[str, Any]],
    *,
    max_tokens: int | None,
    top_logprobs: int | None,
) -> list[GenerateRequest]:
    """One turn for each choice of each input; choices of one seed get seeds of their own."""
    base = sampling(request, config, top_logprobs=top_logprobs)
    reuse = config.context_cache and request.use_kv_cache is not False
    return [
        GenerateRequest(
            turn=0,
            **each,
            sampling=_with_seed(base, choice),
            max_tokens=max_tokens if max_tokens is not None else config.max_tokens,
            stop=request.stops,
            priority=request.priority or 0,
            normalise=_or(request.normalise, config.normalise),
            ignore_eos=bool(request.ignore_eos),
            reuse=reuse,
            names=naming(request, config, choice) if reuse else None,
            exact=config.exact if request.cache_exact is None else request.cache_exact,
            salt=salt,
        )
        for each in inputs
        for choice in range(request.n or 1)
    ]


def _with_seed(base: SamplingParams, choice: int) -> SamplingParams:
    if base.seed is None or choice == 0:
        return base
    return replace(base, seed=base.seed + choice)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
