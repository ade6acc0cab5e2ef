from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.cache.key import chain_key, namespace, pack
from rekindle.cache.ram import RamTier, cost_bytes
from rekindle.cache.store import Store

from .measure import allocated_bytes

keys = st.sampled_from([b"a", b"b", b"c", b"d"])
puts = st.tuples(keys, st.binary(max_size=40), st.integers(0, 10))


@given(st.integers(0, 80), st.lists(puts | keys))
def test_the_budget_holds_and_every_byte_is_counted_once(
    limit_bytes: int, steps: list[tuple[bytes, bytes, int] | bytes]
) -> None:
    tier = RamTier(limit_bytes)
    held: dict[bytes, tuple[bytes, int]] = {}
    for step in steps:
        if isinstance(step, bytes):
            tier.drop(step)
            held.pop(step, None)
        else:
            key, blob, extra = step
            after = {**held, key: (blob, len(blob) + extra)}
            if sum(cost for _, cost in after.values()) <= limit_bytes:
                tier.put(key, blob, len(blob) + extra)
                held = after
            else:
                with pytest.raises(MemoryError):
                    tier.put(key, blob, len(blob) + extra)
        assert tier.used_bytes == sum(cost for _, cost in held.values()) <= limit_bytes
        assert tier.sizes() == {key: len(blob) for key, (blob, _) in held.items()}
        for key in (b"a", b"b", b"c", b"d"):
            assert tier.get(key) == held.get(key, (None, 0))[0]


def in_a_chain(store: Store, blocks: int) -> None:
    root = parent = namespace(b"model", b"tenant", 16)
    for number in range(blocks):
        packed = pack([number] * 16)
        store.put(root, parent, packed, bytes(100), exact=False)
        parent = chain_key(parent, packed)


def side_by_side(store: Store, blocks: int) -> None:
    root = namespace(b"model", b"tenant", 16)
    for number in range(blocks):
        store.put(root, root, pack([number] * 16), bytes(100), exact=False)


def each_in_its_namespace(store: Store, blocks: int) -> None:
    for number in range(blocks):
        root = namespace(b"model", b"%d" % number, 16)
        store.put(root, root, pack([number] * 16), bytes(100), exact=False)


@pytest.mark.parametrize("fill", [in_a_chain, side_by_side, each_in_its_namespace])
def test_the_cost_of_a_block_covers_the_memory_it_takes(fill: Callable[[Store, int], None]) -> None:
    fill(Store(block_tokens=16, ram_bytes=1 << 30), 10)  # what is made once is made now
    store = Store(block_tokens=16, ram_bytes=1 << 30)

    def fill_and_use() -> None:
        fill(store, 1000)
        for _ in range(3):
            store.use(list(store._index))

    taken = allocated_bytes(fill_and_use)
    assert len(store) == 1000
    assert store.used_bytes == 1000 * cost_bytes(bytes(100), pack([0] * 16))
    assert taken <= store.used_bytes <= 2 * taken
