"""Tests the capacities that a runtime reports."""

from __future__ import annotations

from rekindle.kvcache.tiers.ram import RamTier
from rekindle.protocol.frames import PARKED, POOL, RAM, Capacity
from rekindle.runtime.storage.opening import capacities
from tests.support.fake import FakeEngine
from tests.support.memory_tier import MemoryTier


def test_pool_parking_and_tiers_are_counted_in_tokens_of_the_model() -> None:
    engine = FakeEngine(park_tokens=300)
    each = engine.capabilities.kv_layout.token_bytes
    pool, parked, ram = capacities(engine, [RamTier(7 * each + 1)])
    assert pool == Capacity(POOL, engine.pool_tokens, engine.pool_tokens * each)
    assert parked == Capacity(PARKED, 300, 300 * each)
    assert ram == Capacity(RAM, 7, 7 * each + 1)


def test_capacities_list_every_open_tier() -> None:
    further, opening = (MemoryTier(size, lambda _event: None) for size in (1000, 0))
    opening.is_open = False
    places = [
        capacity.place for capacity in capacities(FakeEngine(), [RamTier(0), further, opening])
    ]
    assert places == [POOL, RAM, "memory"]
