"""`usage` of a message: what was computed, what was read from the cache, and what was put there."""

from __future__ import annotations

from typing import Any, Literal

from rekindle.protocol.events import Finished

Lifetime = Literal["5m", "1h"]


def input_usage(
    prompt_tokens: int, reused_tokens: int, lifetime: Lifetime | None
) -> dict[str, Any]:
    """Of a prompt, as soon as it is known what is reused. All that is computed is kept; to say so
    is right only where a client asked for it with a `lifetime`."""
    computed = prompt_tokens - reused_tokens
    created = computed if lifetime else 0
    return {
        "input_tokens": computed - created,
        "cache_read_input_tokens": reused_tokens,
        "cache_creation_input_tokens": created,
        "cache_creation": {
            "ephemeral_5m_input_tokens": created if lifetime == "5m" else 0,
            "ephemeral_1h_input_tokens": created if lifetime == "1h" else 0,
        },
        "service_tier": "standard",
    }


def usage(turn: Finished, lifetime: Lifetime | None) -> dict[str, Any]:
    """Of a whole turn."""
    kept = lifetime if turn.cache.cached_tokens else None
    return {
        **input_usage(turn.prompt_tokens, turn.cache.reused_tokens, kept),
        "output_tokens": turn.completion_tokens,
        "output_tokens_details": {"thinking_tokens": turn.reasoning_tokens},
    }
