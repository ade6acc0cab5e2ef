"""Tests that moving blocks between tiers costs the number of blocks moved, not the depth of
chains."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rekindle.kvcache import placement
from rekindle.kvcache.block import Block, WriteBack, chain, chain_key
from rekindle.kvcache.eviction.hit_density import AGES, CLASSES
from rekindle.kvcache.store import Store
from rekindle.kvcache.tiers.ram import RamTier, cost_bytes
from rekindle.tokens import Tokens
from tests.support.memory_tier import MemoryTier

DEEP = 300
NAMESPACE = b"n" * 32


class Steps:
    """Counts the blocks of chains that were visited."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.taken = 0
        patch.setattr(placement, "chain", self._chain)

    def _chain(self, block: Block | None) -> Iterator[Block]:
        for each in chain(block):
            self.taken += 1
            yield each


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    return Steps(monkeypatch)


def deep_store(lower_bytes: int | None = None, write_back: WriteBack = WriteBack.LATE) -> Store:
    """One conversation that is only in RAM."""
    lower = [] if lower_bytes is None else [MemoryTier(lower_bytes, lambda _event: None)]
    store = Store(block_tokens=1, tiers=[RamTier(1 << 30), *lower])
    extend(store, NAMESPACE, range(DEEP), write_back)
    return store


def extend(store: Store, parent: bytes, ids: range, write_back: WriteBack) -> None:
    for token in ids:
        tokens = Tokens.of([token])
        assert store.put(NAMESPACE, parent, tokens, b"x", exact=False, write_back=write_back)
        parent = chain_key(parent, tokens)


def last_of(store: Store) -> Block:
    return max(store, key=lambda block: block.stop)


def test_writing_everything_visits_each_block_once(steps: Steps) -> None:
    store = deep_store(1 << 30)
    store.write_back.write_everything()
    assert all(block.is_persistent for block in store)
    assert steps.taken <= 4 * DEEP


def test_writing_everything_visits_each_block_once_if_a_tier_takes_nothing(steps: Steps) -> None:
    store = deep_store(0)
    store.write_back.write_everything()
    assert steps.taken <= 4 * DEEP


def test_writing_everything_visits_each_block_once_if_the_first_may_not_be_written(
    steps: Steps,
) -> None:
    store = deep_store(1 << 30)
    next(iter(store)).write_back = WriteBack.NEVER
    store.write_back.write_everything()
    assert not any(block.is_persistent for block in store)
    assert steps.taken <= 4 * DEEP


def test_only_the_missing_blocks_of_a_chain_are_written(steps: Steps) -> None:
    store = deep_store(1 << 30)
    store.write_back.write_everything()
    extend(store, last_of(store).key, range(DEEP, DEEP + 5), WriteBack.NEVER)
    steps.taken = 0
    store.write_back.write_chain(last_of(store))
    assert last_of(store).is_persistent
    assert steps.taken <= 20


def test_extending_a_deep_conversation_in_a_full_tier_costs_only_the_new_blocks(
    steps: Steps,
) -> None:
    store = deep_store()
    stranger = b"s" * 32
    for token in range(50):
        store.put(stranger, stranger, Tokens.of([token]), b"x", exact=False)
    budget = store.tiers[0].budget
    budget.limit_bytes = budget.used_bytes
    end = max((b for b in store if b.namespace == NAMESPACE), key=lambda block: block.stop)
    steps.taken = 0
    extend(store, end.key, range(DEEP, DEEP + 20), WriteBack.NEVER)
    assert steps.taken <= 4 * 20


def test_nothing_is_evicted_for_a_block_that_cannot_fit() -> None:
    store = deep_store()
    stranger = b"s" * 32
    store.put(stranger, stranger, Tokens.of([1]), b"x", exact=False)
    budget = store.tiers[0].budget
    budget.limit_bytes = budget.used_bytes
    large = b"x" * budget.held_bytes(stranger) * 2
    end = max((b for b in store if b.namespace == NAMESPACE), key=lambda block: block.stop)
    assert not store.put(NAMESPACE, end.key, Tokens.of([DEEP]), large, exact=False)
    assert store.counts.evicted_blocks == 0


def full_store(least_chance: float, write_back: WriteBack) -> tuple[Store, MemoryTier]:
    """Ten blocks have passed through a RAM of four, which has learned that one in ten comes
    back."""
    ram = RamTier(4 * cost_bytes(Tokens.of([0]), 1))
    hits, lives = [[25.6] * AGES] * CLASSES, [[256.0] * AGES] * CLASSES
    ram.budget.estimator.load([hits, lives])
    lower = MemoryTier(1 << 30, lambda _event: None)
    store = Store(block_tokens=1, tiers=[ram, lower], min_reuse_probability=least_chance)
    for token in range(10):
        extend(store, NAMESPACE, range(token, token + 1), write_back)
    return store, lower


@pytest.mark.parametrize(
    ("least_chance", "write_back", "written"),
    [
        (0.2, WriteBack.LATE, 0),
        (0.2, WriteBack.SOON, 10),
        (0.0, WriteBack.LATE, 6),
        (0.05, WriteBack.LATE, 6),
    ],
)
def test_an_evicted_block_is_written_if_it_is_likely_to_be_used_again(
    least_chance: float, write_back: WriteBack, written: int
) -> None:
    store, lower = full_store(least_chance, write_back)
    assert sum(lower.holds(block) for block in store) == written
    assert len(store) == (10 if written else 4)


def test_a_shutdown_writes_unlikely_blocks_too() -> None:
    store, lower = full_store(0.2, WriteBack.LATE)
    store.write_back.write_everything()
    assert sum(lower.holds(block) for block in store) == 4


def test_blocks_are_written_while_nothing_is_known_about_reuse() -> None:
    ram = RamTier(4 * cost_bytes(Tokens.of([0]), 1))
    lower = MemoryTier(1 << 30, lambda _event: None)
    store = Store(block_tokens=1, tiers=[ram, lower], min_reuse_probability=1.0)
    for token in range(10):
        extend(store, NAMESPACE, range(token, token + 1), WriteBack.LATE)
    assert sum(lower.holds(block) for block in store) == 6
