from __future__ import annotations

from blake3 import blake3

from rekindle.kvcache.eviction.hit_density import Ghost, GhostTable
from tests.kvcache.measure import allocated_bytes


def key_of(number: int) -> bytes:
    return blake3(number.to_bytes(8, "big")).digest()


def test_a_ghost_is_taken_once() -> None:
    ghosts = GhostTable()
    assert ghosts.put(key_of(1), Ghost(3, 17)) is None
    assert ghosts.take(key_of(2)) is None
    assert ghosts.take(key_of(1)) == Ghost(3, 17)
    assert ghosts.take(key_of(1)) is None


def test_the_first_ghost_of_a_full_set_is_overwritten_and_returned() -> None:
    ghosts = GhostTable()
    forgotten = [ghosts.put(key_of(i), Ghost(i % 4, i)) for i in range(4 * GhostTable.MIN_SLOTS)]
    assert (
        sum(ghosts.take(key_of(i)) is not None for i in range(4 * GhostTable.MIN_SLOTS))
        == GhostTable.MIN_SLOTS
    )
    named = [ghost for ghost in forgotten if ghost is not None]
    assert len(named) == 3 * GhostTable.MIN_SLOTS
    assert all(ghost.class_ == ghost.used_tick % 4 for ghost in named)
    ticks = [ghost.used_tick for ghost in named]
    assert max(ticks) < 4 * GhostTable.MIN_SLOTS - 8  # none of the last ones


def test_growing_keeps_all_ghosts() -> None:
    ghosts = GhostTable()
    count = GhostTable.MIN_SLOTS // 16
    assert not any(ghosts.put(key_of(i), Ghost(i % 4, i)) for i in range(count))
    ghosts.grow(GhostTable.MIN_SLOTS * 5)
    assert ghosts.slots == GhostTable.MIN_SLOTS * 8
    assert [ghosts.take(key_of(i)) for i in range(count)] == [Ghost(i % 4, i) for i in range(count)]


def test_the_table_takes_17_bytes_per_slot_and_grows_to_a_limit() -> None:
    ghosts = GhostTable()
    slots = GhostTable.MIN_SLOTS * 8
    assert allocated_bytes(lambda: ghosts.grow(slots)) < slots * GhostTable.SLOT_BYTES * 1.1
    ghosts.grow(1 << 40)
    assert ghosts.slots == GhostTable.MAX_SLOTS
