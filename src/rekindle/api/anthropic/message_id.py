"""Ids of messages: random, and with the model in them that wrote the message."""

from __future__ import annotations

import secrets

from blake3 import blake3

PREFIX = "msg_"
MODEL_DIGITS = 8
RANDOM_BYTES = 12


def new_message_id(model: str) -> str:
    return f"{PREFIX}{_mark(model)}{secrets.token_hex(RANDOM_BYTES)}"


def is_of_other_model(message_id: str, model: str) -> bool:
    """Whether an id of ours is that of another model's message."""
    digits = message_id.removeprefix(PREFIX)
    is_ours = message_id != digits and len(digits) == MODEL_DIGITS + 2 * RANDOM_BYTES
    return is_ours and not digits.startswith(_mark(model))


def _mark(model: str) -> str:
    return blake3(model.encode()).hexdigest()[:MODEL_DIGITS]
