"""Describes turns in the words of llama.cpp's server: settings, timings and the final object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rekindle.api.base.fields import NO_LIMIT
from rekindle.protocol.events import AssistantMessage, Finished, TokenLogprob
from rekindle.protocol.requests import GenerateRequest, SamplingParams
from rekindle.worker.client import RuntimeClient

RANDOM_SEED = 0xFFFFFFFF
#: The order in which the sampler works. Clients cannot change it.
SAMPLERS = ("penalties", "dry", "top_k", "typ_p", "top_p", "min_p", "temperature")
#: Samplers that this server does not have, with the values that turn them off.
ABSENT_SAMPLERS = {
    "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0,
    "top_n_sigma": -1.0,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
    "adaptive_target": -1.0,
    "adaptive_decay": 0.9,
    "n_keep": 0,
    "n_discard": 0,
    "min_keep": 0,
}


def sampling_settings(sampling: SamplingParams, max_tokens: int | None) -> dict[str, Any]:
    """The settings that decide how tokens are chosen, as `/props` and `/completion` show them."""
    limit = NO_LIMIT if max_tokens is None else max_tokens
    return {
        "n_predict": limit,
        "max_tokens": limit,
        "seed": RANDOM_SEED if sampling.seed is None else sampling.seed,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "typical_p": sampling.typical_p,
        "repeat_last_n": sampling.repetition_context_size,
        "repeat_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "dry_multiplier": sampling.dry_multiplier,
        "dry_base": sampling.dry_base,
        "dry_allowed_length": sampling.dry_allowed_length,
        "dry_penalty_last_n": sampling.dry_penalty_last_n,
        "dry_sequence_breakers": list(sampling.dry_sequence_breakers),
        **ABSENT_SAMPLERS,
        "samplers": list(SAMPLERS),
        "n_probs": sampling.top_logprobs or 0,
        "lora": [],
    }


def generation_settings(
    request: GenerateRequest, runtime: RuntimeClient, *, stream: bool
) -> dict[str, Any]:
    """The settings of one turn. A bias of null forbids a token."""
    biases = dict(request.sampling.logit_bias)
    if request.ignore_eos and runtime.ready is not None:
        biases |= dict.fromkeys(runtime.ready.end_tokens, float("-inf"))
    structure = request.structured_output
    return {
        **sampling_settings(request.sampling, request.max_tokens),
        "stop": request.stop,
        "ignore_eos": request.ignore_eos,
        "stream": stream,
        "grammar": (structure.grammar if structure else None) or "",
        "logit_bias": [
            {"token": token, "bias": None if bias == float("-inf") else bias}
            for token, bias in biases.items()
        ],
    }


def final_object(
    index: int,
    message: AssistantMessage,
    finished: Finished,
    settings: dict[str, Any],
    runtime: RuntimeClient,
    prompt: str | None,
) -> dict[str, Any]:
    """A finished completion, without its tokens and their probabilities."""
    total = finished.prompt_tokens + finished.completion_tokens
    context = runtime.ready.context_tokens if runtime.ready else total + 1
    return {
        "index": index,
        "content": message.text,
        "id_slot": 0,
        "stop": True,
        "model": runtime.name,
        "tokens_predicted": finished.completion_tokens,
        "tokens_evaluated": finished.prompt_tokens,
        "tokens_cached": finished.cache.reused_tokens,
        "generation_settings": settings,
        "prompt": prompt or "",
        "has_new_line": "\n" in message.text,
        "truncated": finished.reason == "length" and total >= context,
        "stop_type": stop_type(finished),
        "stopping_word": finished.stop_string or "",
        "timings": timings([finished], 1),
    }


def stop_type(finished: Finished) -> str:
    if finished.reason == "length":
        return "limit"
    return "eos" if finished.stop_string is None else "word"


def timings(turns: Sequence[Finished], choices: int) -> dict[str, Any]:
    """llama.cpp's `timings`: tokens, milliseconds and speeds."""
    prompts = turns[::choices]
    reused = sum(turn.cache.reused_tokens for turn in prompts)
    computed = sum(turn.prompt_tokens for turn in prompts) - reused
    generated = sum(turn.completion_tokens for turn in turns)
    return {
        "cache_n": reused,
        **_speed("prompt", computed, computed, sum(turn.prompt_eval_s for turn in prompts)),
        **_speed(
            "predicted",
            generated,
            sum(max(turn.completion_tokens - 1, 0) for turn in turns),
            sum(turn.completion_s for turn in turns),
        ),
    }


def prompt_timings(reused: int, done: int, elapsed_s: float) -> dict[str, Any]:
    """`timings` while the prompt is computed."""
    computed = done - reused
    spent_s = elapsed_s if computed else 0.0
    return {
        "cache_n": reused,
        **_speed("prompt", computed, computed, spent_s),
        **_speed("predicted", 0, 0, 0.0),
    }


def _speed(what: str, tokens: int, timed: int, seconds: float) -> dict[str, Any]:
    """`timed` is how many of the tokens were computed in this time. The first token of a reply
    comes with the prompt's last step."""
    ms = round(seconds * 1000, 3)
    return {
        f"{what}_n": tokens,
        f"{what}_ms": ms,
        f"{what}_per_token_ms": round(ms / timed, 6) if timed else 0.0,
        f"{what}_per_second": round(timed * 1000 / ms, 6) if ms else 0.0,
    }


def prompt_progress(total: int, reused: int, done: int, elapsed_s: float) -> dict[str, int]:
    """llama.cpp's report on prefill, which it sends after each chunk."""
    elapsed_ms = round(elapsed_s * 1000)
    return {"total": total, "cache": reused, "processed": done, "time_ms": elapsed_ms}


def probabilities(logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """llama.cpp's `completion_probabilities`."""
    return [
        {
            **_token(each.token, each.piece, each.logprob),
            "top_logprobs": [
                _token(token, piece, logprob)
                for token, (piece, logprob) in zip(each.top_tokens, each.top, strict=True)
            ],
        }
        for each in logprobs
    ]


def _token(token: int, piece: bytes, logprob: float) -> dict[str, Any]:
    return {
        "id": token,
        "token": piece.decode(errors="replace"),
        "bytes": list(piece),
        "logprob": max(logprob, -9999.0),  # JSON has no minus infinity
    }
