"""A key that this model does not know, because another loaded model made it."""

from __future__ import annotations

from collections.abc import Sequence

from rekindle.api.cache.questions import Questions
from rekindle.errors import CacheKeyNotFound
from rekindle.protocol.events import Finished
from rekindle.protocol.wire import Ask
from rekindle.server.runtime_client import Runtime

MISMATCH = "model_mismatch"


async def reason_for(reason: str, cache_key: str, others: Sequence[Runtime], salt: bytes) -> str:
    """The reason, told more closely where the key is another model's."""
    if reason == CacheKeyNotFound.code and await Questions(salt).knows(others, cache_key):
        return MISMATCH
    return reason


async def name_mismatch(turns: Sequence[Finished], ask: Ask, others: Sequence[Runtime]) -> None:
    """Correct the report of the first turn, which is the one that bears the names."""
    if ask.naming is None or ask.naming.cache_key is None:
        return
    report = turns[0].cache
    report.reason = await reason_for(report.reason, ask.naming.cache_key, others, ask.salt)
