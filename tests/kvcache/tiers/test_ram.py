from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.kvcache.block import Block, BlockKind, chain_key, namespace
from rekindle.kvcache.store import Store
from rekindle.kvcache.tiers.ram import RamTier, cost_bytes
from rekindle.tokens import Tokens
from tests.kvcache.measure import allocated_bytes

names = st.sampled_from([1, 2, 3, 4])
puts = st.tuples(names, st.binary(max_size=40))


def block(name: int) -> Block:
    root = Block(b"r" * 32, None, Tokens(), BlockKind(0, exact=True))
    return Block(b"%d" % name, root, Tokens.of([name]), BlockKind(0, exact=False))


@given(st.integers(0, 4).map(lambda blocks: blocks * 1600), st.lists(puts | names))
def test_ram_keeps_its_budget_and_counts_every_byte_once(
    limit_bytes: int, steps: list[tuple[int, bytes] | int]
) -> None:
    tier = RamTier(limit_bytes)
    blocks = {name: block(name) for name in (1, 2, 3, 4)}
    held: dict[int, bytes] = {}

    def cost(held: dict[int, bytes]) -> int:
        return sum(cost_bytes(blocks[name].tokens, len(blob)) for name, blob in held.items())

    for step in steps:
        if isinstance(step, int):
            tier.remove(blocks[step])
            held.pop(step, None)
            continue
        name, blob = step
        after = {**held, name: blob}
        if cost(after) <= limit_bytes:
            tier.put(blocks[name], blob)
            held = after
        else:
            with pytest.raises(MemoryError):
                tier.put(blocks[name], blob)
        assert (
            tier.budget.used_bytes == tier.budget.held_bytes(b"r" * 32) == cost(held) <= limit_bytes
        )
        for name in (1, 2, 3, 4):
            assert tier.get(blocks[name]) == held.get(name)


def in_a_chain(store: Store, blocks: int) -> None:
    root = parent = namespace(b"model", b"tenant", 16)
    for number in range(blocks):
        packed = Tokens.of([number] * 16)
        store.put(root, parent, packed, bytes(100), exact=False)
        parent = chain_key(parent, packed)


def side_by_side(store: Store, blocks: int) -> None:
    root = namespace(b"model", b"tenant", 16)
    for number in range(blocks):
        store.put(root, root, Tokens.of([number] * 16), bytes(100), exact=False)


def in_many_namespaces(store: Store, blocks: int) -> None:
    """A namespace belongs to an API key and has at least a few blocks."""
    for number in range(blocks):
        root = namespace(b"model", b"%d" % (number // 4), 16)
        store.put(root, root, Tokens.of([number] * 16), bytes(100), exact=False)


@pytest.mark.parametrize("fill", [in_a_chain, side_by_side, in_many_namespaces])
def test_the_cost_of_a_block_covers_the_memory_it_takes(fill: Callable[[Store, int], None]) -> None:
    fill(Store(block_tokens=16, tiers=[RamTier(1 << 30)]), 10)  # what is made once is made now
    store = Store(block_tokens=16, tiers=[RamTier(1 << 30)])

    def fill_and_use() -> None:
        fill(store, 1000)
        for _ in range(3):
            store.use(list(store))

    taken = allocated_bytes(fill_and_use)
    assert len(store) == 1000
    assert store.tiers[0].budget.used_bytes == 1000 * cost_bytes(Tokens.of([0] * 16), 100)
    assert taken <= store.tiers[0].budget.used_bytes <= 2 * taken
