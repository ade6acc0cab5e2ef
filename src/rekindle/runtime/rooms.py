"""What there is room for of a model's state, place by place."""

from __future__ import annotations

from collections.abc import Iterable

from rekindle.engine.base import Engine
from rekindle.kvcache.tiers.base import Tier
from rekindle.protocol.frames import PARKED, POOL, Room


def rooms(engine: Engine, tiers: Iterable[Tier]) -> tuple[Room, ...]:
    """Nearest first; the disk once its folder is open."""
    capabilities = engine.capabilities
    token_bytes = max(capabilities.kv_layout.token_bytes, 1)
    on_device = {POOL: capabilities.pool_tokens}
    if engine.parking:
        on_device[PARKED] = engine.parking.tokens
    found = [Room(place, tokens, tokens * token_bytes) for place, tokens in on_device.items()]
    for tier in tiers:
        limit_bytes = tier.budget.limit_bytes
        if limit_bytes or tier.is_open:
            found.append(Room(tier.name, limit_bytes // token_bytes, limit_bytes))
    return tuple(found)
