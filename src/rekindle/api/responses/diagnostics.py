"""`prompt_cache_diagnostics`: what has changed since a response that the client names."""

from __future__ import annotations

from typing import Any

from rekindle.protocol.events import CacheReport, Reason

CHANGES = {
    Reason.SYSTEM_CHANGED: "input_changed",
    Reason.TOOLS_CHANGED: "tools_changed",
    Reason.TURN_CHANGED: "input_changed",
    Reason.PREFIX_CHANGED: "input_changed",
    Reason.REQUEST_SHORTER: "input_changed",
    Reason.MODEL_MISMATCH: "model_changed",
}


def diagnostics(prompt_tokens: int, cache: CacheReport) -> dict[str, Any]:
    """Of a turn that was compared with the response."""
    missed = {
        "cache_missed_tokens": prompt_tokens - cache.reused_tokens,
        "comparison_reusable_tokens": cache.reused_tokens,
    }
    if cache.cache_key is None and cache.reason is not Reason.MODEL_MISMATCH:
        return {"type": "comparison_response_not_found"}
    if cache.reason is Reason.FULL_MATCH:
        return {"type": "cache_hit"}
    change = CHANGES.get(cache.reason)
    # Nothing has changed, and yet not all of it was there: it was evicted, or was damaged.
    return {"type": "cache_miss", "reason": change, **missed} if change else {"type": "unavailable"}
