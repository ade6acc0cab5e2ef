"""`diagnostics.cache_miss_reason`: what has changed since a message that the client names."""

from __future__ import annotations

from typing import Any

from rekindle.api.anthropic.message_id import is_of_other_model
from rekindle.protocol.events import CacheReport, Reason

CHANGES = {
    Reason.SYSTEM_CHANGED: "system_changed",
    Reason.TOOLS_CHANGED: "tools_changed",
    Reason.TURN_CHANGED: "messages_changed",
    Reason.PREFIX_CHANGED: "messages_changed",
    Reason.REQUEST_SHORTER: "messages_changed",
}


def diagnostics(
    previous: str | None, model: str, prompt_tokens: int, cache: CacheReport
) -> dict[str, Any] | None:
    """None: nothing has changed but what was added, or there is nothing to compare with."""
    if previous is None:
        return None
    missed = {"cache_missed_input_tokens": prompt_tokens - cache.reused_tokens}
    if cache.cache_key is None:
        if is_of_other_model(previous, model):
            return _reason("model_changed", **missed)
        return _reason("previous_message_not_found")
    if cache.reason is Reason.FULL_MATCH:
        return None
    change = CHANGES.get(cache.reason)
    # Nothing has changed, and yet not all of it was there: it was evicted, or was damaged.
    return _reason(change, **missed) if change else _reason("unavailable")


def _reason(kind: str, **fields: int) -> dict[str, Any]:
    return {"cache_miss_reason": {"type": kind, **fields}}
