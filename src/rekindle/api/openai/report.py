"""`usage` of an answer: what it cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import structs

from rekindle.protocol.events import Finished


def usage(
    turns: Sequence[Finished], choices: int, first_byte_at_s: float | None = None
) -> dict[str, Any]:
    """A prompt with several choices counts once."""
    prompts = turns[::choices]
    prompt_tokens = sum(turn.prompt_tokens for turn in prompts)
    completion_tokens = sum(turn.completion_tokens for turn in turns)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(turn.cache.reused_tokens for turn in prompts)
        },
        "completion_tokens_details": {
            "reasoning_tokens": sum(turn.reasoning_tokens for turn in turns)
        },
        "prompt_eval_time": round(sum(turn.prompt_eval_s for turn in prompts), 6),
        **_first_token_time(turns[0], first_byte_at_s),
    }


def timings(turns: Sequence[Finished], choices: int) -> dict[str, Any]:
    """The same as llama.cpp's server tells it: tokens, milliseconds and speeds."""
    prompts = turns[::choices]
    reused = sum(turn.cache.reused_tokens for turn in prompts)
    computed = sum(turn.prompt_tokens for turn in prompts) - reused
    generated = sum(turn.completion_tokens for turn in turns)
    return {
        "cache_n": reused,
        **_speed("prompt", computed, sum(turn.prompt_eval_s for turn in prompts)),
        **_speed("predicted", generated, sum(turn.completion_s for turn in turns)),
    }


def _speed(what: str, tokens: int, seconds: float) -> dict[str, Any]:
    ms = seconds * 1000
    return {
        f"{what}_n": tokens,
        f"{what}_ms": round(ms, 3),
        f"{what}_per_token_ms": round(ms / tokens, 6) if tokens else 0.0,
        f"{what}_per_second": round(tokens / seconds, 3) if seconds else 0.0,
    }


def _first_token_time(turn: Finished, first_byte_at_s: float | None) -> dict[str, Any]:
    """Seconds of each stage up to the first token, and in a stream up to the first byte of it."""
    if turn.stages is None:
        return {}
    stages = structs.asdict(turn.stages)
    if first_byte_at_s is not None and turn.first_token_at_s is not None:
        stages["first_byte"] = first_byte_at_s - turn.first_token_at_s
    return {"first_token_time": {stage: round(spent, 6) for stage, spent in stages.items()}}
