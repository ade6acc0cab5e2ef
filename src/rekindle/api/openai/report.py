"""What an answer says about its cost: usage, and what was reused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import structs

from rekindle.protocol.events import CacheReport, Finished


def usage(turns: Sequence[Finished], choices: int) -> dict[str, Any]:
    """A prompt that was asked for several choices counts once."""
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
    }


def x_cache(turns: Sequence[Finished], choices: int) -> dict[str, Any]:
    """The first choice's report; over several prompts their sum, and the first thing amiss."""
    reports = [turn.cache for turn in turns[::choices]]
    telling = next((report for report in reports if report.status != "hit"), reports[0])
    status = _status(reports)
    told: dict[str, Any] = {
        "hit": status != "miss",
        "status": status,
        "cache_key": telling.cache_key,
        "reused_tokens": sum(report.reused_tokens for report in reports),
        "new_cache_key": telling.new_cache_key,
        "cached_tokens": sum(report.cached_tokens for report in reports),
        "reason": telling.reason,
        "tier": next((report.tier for report in reports if report.tier), None),
    }
    if telling.diverged_at is not None:
        told["diverged_at"] = structs.asdict(telling.diverged_at)
    if normalised := dict.fromkeys(what for report in reports for what in report.normalised):
        told["normalised"] = list(normalised)
    return told


def _status(reports: Sequence[CacheReport]) -> str:
    kinds = {report.status for report in reports}
    return kinds.pop() if len(kinds) == 1 else "partial_hit"
