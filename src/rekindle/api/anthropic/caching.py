"""Implements `cache_control`: lifetimes, usage, message ids and diagnostics."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

from blake3 import blake3

from rekindle.api.anthropic.blocks import CacheControl, Lifetime, as_blocks
from rekindle.api.anthropic.schema import MessagesRequest
from rekindle.protocol.events import CacheReport, Finished, Reason


def input_usage(
    prompt_tokens: int, reused_tokens: int, lifetime: Lifetime | None
) -> dict[str, Any]:
    """Usage of a prompt, which is known before the first token.

    Everything computed is kept. It counts as created only if a `cache_control` mark pins it for a
    `lifetime`. Otherwise the prompt is `input_tokens` plus `cache_read_input_tokens`.
    """
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
    is_pinned = turn.cache.cached_tokens and not turn.cache.pin_refused
    return {
        **input_usage(
            turn.prompt_tokens, turn.cache.reused_tokens, lifetime if is_pinned else None
        ),
        "output_tokens": turn.completion_tokens,
        "output_tokens_details": {"thinking_tokens": turn.reasoning_tokens},
    }


LIFETIMES_S: dict[Lifetime, float] = {"5m": 300.0, "1h": 3600.0}


def lifetime_of(body: MessagesRequest) -> Lifetime | None:
    """The longest lifetime of all `cache_control` marks, or None without any."""
    marks = {mark.ttl for mark in _marks(body) if mark is not None}
    return "1h" if "1h" in marks else "5m" if marks else None


def _marks(body: MessagesRequest) -> Iterator[CacheControl | None]:
    yield body.cache_control
    for each in (*(body.tools or ()), *as_blocks(body.system), *body.blocks):
        yield each.cache_control


# An id is PREFIX, MODEL_DIGITS of the model's hash, and 24 random digits.
PREFIX = "msg_"
MODEL_DIGITS = 8


def new_message_id(model: str) -> str:
    return f"{PREFIX}{_mark(model)}{secrets.token_hex(12)}"


def is_of_other_model(message_id: str, model: str) -> bool:
    """Whether the id is ours, and another model wrote its message."""
    digits = message_id.removeprefix(PREFIX)
    is_ours = message_id != digits and len(digits) == MODEL_DIGITS + 24
    return is_ours and not digits.startswith(_mark(model))


def _mark(model: str) -> str:
    return blake3(model.encode()).hexdigest()[:MODEL_DIGITS]


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
    """Compare the prompt with a previous message of the conversation: why was state not reused?

    Returns None if messages were only added, or if the client names no previous message.
    """
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
    # The prompt has not changed, but some of its state was evicted or damaged.
    return _reason(change, **missed) if change else _reason("unavailable")


def _reason(kind: str, **fields: int) -> dict[str, Any]:
    return {"cache_miss_reason": {"type": kind, **fields}}
