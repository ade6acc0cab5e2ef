"""`usage` of a response: what was computed, what was read from the cache, what was put there."""

from __future__ import annotations

from typing import Any, Literal

from rekindle.protocol.events import Finished

Lifetime = Literal["30m", "12h"]
LIFETIMES_S: dict[Lifetime, float] = {"30m": 1800.0, "12h": 43_200.0}


def usage(turn: Finished, lifetime: Lifetime | None) -> dict[str, Any]:
    """`lifetime`: that was asked for."""
    reused = turn.cache.reused_tokens
    written = turn.prompt_tokens - reused if turn.cache.cached_tokens else 0
    details: dict[str, Any] = {"cached_tokens": reused, "cache_write_tokens": written}
    if lifetime is not None:
        details["cache_write_tokens_details"] = {
            f"ttl_{each}_tokens": written if each == lifetime else 0 for each in LIFETIMES_S
        }
    return {
        "input_tokens": turn.prompt_tokens,
        "input_tokens_details": details,
        "output_tokens": turn.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": turn.reasoning_tokens},
        "total_tokens": turn.prompt_tokens + turn.completion_tokens,
    }
