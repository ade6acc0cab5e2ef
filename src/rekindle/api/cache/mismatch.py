"""A key that this model does not know, because another loaded model made it."""

from __future__ import annotations

from collections.abc import Sequence

from rekindle.api.cache.questions import Questions
from rekindle.protocol.events import Finished, Reason
from rekindle.protocol.requests import GenerateRequest
from rekindle.server.runtime_client import RuntimeClient


async def reason_for(
    reason: Reason, cache_key: str, others: Sequence[RuntimeClient], salt: bytes
) -> Reason:
    """The reason, told more closely where the key is another model's."""
    if reason is Reason.CACHE_KEY_NOT_FOUND and await Questions(salt).knows(others, cache_key):
        return Reason.MODEL_MISMATCH
    return reason


async def name_mismatch(
    turns: Sequence[Finished], ask: GenerateRequest, others: Sequence[RuntimeClient]
) -> None:
    """Correct the report of the first turn, which is the one that bears the names."""
    if ask.names is None or ask.names.cache_key is None:
        return
    report = turns[0].cache
    report.reason = await reason_for(report.reason, ask.names.cache_key, others, ask.salt)
