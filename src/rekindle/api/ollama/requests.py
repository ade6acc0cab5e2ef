"""From a request of Ollama's API to the turn that a runtime computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rekindle.api.illustration import Illustrated
from rekindle.api.message import Message, rendered
from rekindle.api.ollama.schema import RequestBase
from rekindle.config import Config
from rekindle.protocol.requests import GenerateRequest, SamplingParams

WHOLE_CONTEXT = -1  # as `repeat_last_n`


def conversation(messages: Sequence[Message], illustrated: Illustrated | None) -> dict[str, Any]:
    """The fields of a request that are its messages; `illustrated`: with pictures."""
    if illustrated is not None:
        return {"messages": illustrated.messages, "pictures": illustrated.pictures}
    return {"messages": rendered(list(messages))}


def generate_request(
    body: RequestBase, config: Config, salt: bytes, prompt: dict[str, Any]
) -> GenerateRequest:
    """`prompt`: the fields that say what the model reads."""
    return GenerateRequest(
        turn=0,
        **prompt,
        template_kwargs=body.template_kwargs,
        structured_output=body.structure,
        sampling=_sampling(body, config),
        max_tokens=_limit(body.chosen.num_predict, config),
        stop=body.chosen.stops,
        normalise=config.normalise,
        reuse=config.context_cache,
        exact=config.exact,
        kv_bits=config.kv_bits,
        kv_quantization_start=config.kv_quantization_start,
        salt=salt,
    )


def _sampling(body: RequestBase, config: Config) -> SamplingParams:
    options = body.chosen
    window = _or(options.repeat_last_n, config.repetition_context_size)
    return SamplingParams(
        temperature=_or(options.temperature, config.temperature),
        top_p=_or(options.top_p, config.top_p),
        top_k=max(options.top_k or 0, 0),
        min_p=options.min_p or 0.0,
        repetition_penalty=_or(options.repeat_penalty, config.repetition_penalty),
        repetition_context_size=1 << 20 if window == WHOLE_CONTEXT else window,
        presence_penalty=options.presence_penalty or 0.0,
        frequency_penalty=options.frequency_penalty or 0.0,
        seed=options.seed,
    )


def _limit(num_predict: int | None, config: Config) -> int | None:
    """None: until the model stops or the context ends."""
    if num_predict is None:
        return config.max_tokens
    return num_predict if num_predict > 0 else None


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
