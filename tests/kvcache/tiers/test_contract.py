"""Tests what every tier promises the store."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from queue import SimpleQueue

import pytest

from rekindle.kvcache.block import Block, BlockKind, chain_key
from rekindle.kvcache.codec import Record
from rekindle.kvcache.disk.folder import open_folder
from rekindle.kvcache.tiers.base import (
    Fetch,
    Fetched,
    Flushed,
    Tier,
    TierEvent,
    TierState,
    WriteFailed,
    Written,
)
from rekindle.kvcache.tiers.disk import DiskTier
from rekindle.kvcache.tiers.ram import RamTier
from rekindle.tokens import Tokens
from tests.support.memory_tier import MemoryTier

NAMESPACE, STRANGER = b"n" * 32, b"s" * 32
PLENTY_BYTES = 1 << 24
PATIENCE_S = 20.0
STATE = b"state" * 100
BETTER = STATE + b"checkpoint" * 500

Failing = Callable[[TierState], AbstractContextManager[None]]


class Place:
    """A tier and its events, which are handled as in the store."""

    def __init__(self, tier: Tier, events: SimpleQueue[TierEvent], failing: Failing | None) -> None:
        self.tier = tier
        self.events = events
        self.failing = failing  # None: it cannot fail
        self.reported: list[TierEvent] = []

    def flush(self) -> None:
        """Wait until every order is done or has failed."""
        done: list[bool] = []
        self.tier.flush(done.append)
        while not done:
            self.take_in()

    def take_in(self) -> None:
        if isinstance(self.tier, MemoryTier):
            self.tier.advance()
        event = self.events.get(timeout=PATIENCE_S)
        self.reported.append(event)
        match event:
            case Written() | WriteFailed():
                for write in self.tier.complete(event):
                    copy = BLOCKS[write.key].copies[self.tier.name]
                    copy.written = write.kind if isinstance(event, Written) else copy.written
            case Fetched(fetch):
                fetch.is_done = True
            case Flushed(then, is_safe):
                then(is_safe)

    def state_of(self, block: Block) -> bytes | None:
        """The bytes of a block from memory or from a read."""
        self.flush()
        blob = self.tier.get(block)
        if blob is None and self.tier.holds(block):
            blob = self.read(block).blob(block)
        return None if blob is None else bytes(blob)

    def read(self, block: Block) -> Fetch:
        fetch = Fetch.of(self.tier.name, [block])
        self.tier.read([block], fetch)
        while not fetch.is_done:
            self.take_in()
        return fetch


BLOCKS: dict[bytes, Block] = {}


def child(parent: Block, *ids: int, state_bytes: int = len(STATE)) -> Block:
    """A block under another one. A root has no copies."""
    tokens = Tokens.of(ids)
    block = Block(
        chain_key(parent.key, tokens), parent, tokens, BlockKind(state_bytes, exact=False)
    )
    parent.children[tokens.packed] = BLOCKS[block.key] = block
    return block


def root(namespace: bytes = NAMESPACE) -> Block:
    return Block(namespace, None, Tokens(), BlockKind(0, exact=True))


def ram(_folder: Path, limit_bytes: int) -> Place:
    return Place(RamTier(limit_bytes), SimpleQueue(), None)


def disk(folder: Path, limit_bytes: int) -> Place:
    events: SimpleQueue[TierEvent] = SimpleQueue()
    opened = open_folder(folder, b"model", limit_bytes=1 << 30)
    tier = DiskTier(opened, events.put)
    tier.budget.limit_bytes = limit_bytes
    codes: dict[TierState, int] = {"full": errno.ENOSPC, "failing": errno.EIO}

    @contextmanager
    def failing(state: TierState) -> Iterator[None]:
        def fail(records: Iterable[Record]) -> None:
            raise OSError(codes[state], "no")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(opened.block_files, "write", fail)
            yield

    return Place(tier, events, failing)


def memory(_folder: Path, limit_bytes: int) -> Place:
    events: SimpleQueue[TierEvent] = SimpleQueue()
    tier = MemoryTier(limit_bytes, events.put)

    @contextmanager
    def failing(state: TierState) -> Iterator[None]:
        tier.failure = state
        yield
        tier.failure = "ok"

    return Place(tier, events, failing)


KINDS = (ram, disk, memory)  # one line for each tier


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    made: Place = request.param(tmp_path, PLENTY_BYTES)
    yield made
    made.tier.close()


@pytest.fixture(params=KINDS[1:], ids=lambda kind: kind.__name__)
def lower(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """Persistent tiers that can fail."""
    made: Place = request.param(tmp_path, PLENTY_BYTES)
    yield made
    made.tier.close()


def test_a_block_is_in_memory_until_it_is_written(place: Place) -> None:
    block = child(root(), 1, 2)
    assert not place.tier.holds(block)
    place.tier.put(block, STATE)
    assert place.tier.holds(block)
    assert bytes(place.tier.get(block) or b"") == STATE


def test_a_block_is_read_back_byte_for_byte(place: Place) -> None:
    block = child(root(), 1, 2)
    place.tier.put(block, STATE)
    assert place.state_of(block) == STATE
    assert block.copies[place.tier.name].written == block.kind


def test_a_record_names_its_block(lower: Place) -> None:
    block = child(child(root(), 1), 2)
    assert block.parent is not None
    lower.tier.put(block.parent, STATE)
    lower.tier.put(block, STATE)
    lower.flush()
    record = lower.read(block).records[block.key]
    assert (record.namespace, record.parent) == (NAMESPACE, block.parent.key)
    assert (record.tokens, record.exact, record.resumable) == (block.tokens, False, False)


def test_a_better_state_replaces_the_earlier_one(place: Place) -> None:
    block = child(root(), 1, 2)
    place.tier.put(block, STATE)
    place.flush()
    block.kind = BlockKind(len(BETTER), True, True)
    place.tier.put(block, BETTER)
    assert bytes(place.tier.get(block) or b"") == BETTER
    assert place.state_of(block) == BETTER
    assert block.copies[place.tier.name].written == block.kind
    assert place.tier.budget.used_bytes == place.tier.cost(block.tokens, len(BETTER))


def test_a_second_put_replaces_a_pending_one(place: Place) -> None:
    block = child(root(), 1, 2)
    place.tier.put(block, STATE)
    block.kind = BlockKind(len(BETTER), True, True)
    place.tier.put(block, BETTER)
    assert place.state_of(block) == BETTER
    assert place.tier.pending_bytes == 0


def test_a_removed_block_is_gone_whether_it_was_written_or_not(place: Place) -> None:
    one, other = child(above := root(), 1), child(above, 2)
    place.tier.put(one, STATE)
    place.flush()
    place.tier.put(other, STATE)
    for block in (one, other):
        place.tier.remove(block)
        assert not place.tier.holds(block)
        assert place.tier.get(block) is None
    place.flush()
    assert (place.tier.budget.used_bytes, place.tier.pending_bytes) == (0, 0)
    assert not one.copies
    assert not other.copies


def test_removing_a_missing_block_changes_nothing(place: Place) -> None:
    block = child(root(), 1)
    place.tier.remove(block)
    place.tier.put(block, STATE)
    place.tier.remove(block)
    place.tier.remove(block)
    assert place.tier.budget.used_bytes == 0


def test_a_removed_block_can_be_put_again(place: Place) -> None:
    block = child(root(), 1)
    place.tier.put(block, STATE)
    place.tier.remove(block)
    place.tier.put(block, STATE)
    assert place.state_of(block) == STATE


def test_every_copy_is_counted_once_and_for_its_tenant(place: Place) -> None:
    mine, theirs = child(root(), 1), child(root(STRANGER), 1)
    place.tier.put(mine, STATE)
    place.tier.put(theirs, STATE)
    place.tier.put(mine, STATE)
    cost = place.tier.cost(mine.tokens, len(STATE))
    assert mine.copies[place.tier.name].size_bytes == cost
    assert place.tier.budget.held_bytes(NAMESPACE) == place.tier.budget.held_bytes(STRANGER) == cost
    assert place.tier.budget.used_bytes == 2 * cost


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_cost_fits_as_long_as_the_limit_is_kept(
    kind: Callable[[Path, int], Place], tmp_path: Path
) -> None:
    measured = kind(tmp_path / "one", 0).tier
    cost = measured.cost(Tokens.of([1]), len(STATE))
    measured.close()
    place = kind(tmp_path / "two", 2 * cost)
    assert place.tier.budget.could_fit(2 * cost)
    assert not place.tier.budget.could_fit(2 * cost + 1)
    place.tier.put(child(root(), 1), STATE)
    assert place.tier.budget.fits(cost)
    assert not place.tier.budget.fits(cost + 1)
    place.tier.close()


def test_the_next_victim_is_the_least_valuable_leaf_and_is_not_removed(place: Place) -> None:
    above = root()
    parent = child(above, 1)
    leaf, often = child(parent, 2), child(above, 3)
    for block in (parent, leaf, often):
        place.tier.put(block, STATE)
    place.tier.budget.use(often)
    assert place.tier.budget.next_victim(()) == leaf.key
    assert place.tier.budget.next_victim({leaf.key}) == often.key
    assert (
        place.tier.budget.next_victim({leaf.key, often.key}) is None
    )  # a parent stays with its child
    assert place.tier.holds(leaf)
    place.tier.remove(leaf)
    assert place.tier.budget.next_victim({often.key}) == parent.key


def test_a_flush_is_reported_after_everything_before_it(lower: Place) -> None:
    blocks = [child(root(), number) for number in range(5)]
    for block in blocks:
        lower.tier.put(block, STATE)
    lower.flush()
    assert isinstance(lower.reported[-1], Flushed)
    written = [w.key for e in lower.reported if isinstance(e, Written) for w in e.writes]
    assert sorted(written) == sorted(block.key for block in blocks)
    assert lower.tier.counts.written_bytes > 0


def test_a_fetch_of_many_blocks_is_reported_once(lower: Place) -> None:
    blocks = [child(root(), number) for number in range(20)]
    for block in blocks:
        lower.tier.put(block, STATE)
    lower.flush()
    lower.reported.clear()
    fetch = Fetch.of(lower.tier.name, blocks)
    lower.tier.read(blocks, fetch)
    while not fetch.is_done:
        lower.take_in()
    assert lower.reported == [Fetched(fetch)]
    assert all(bytes(fetch.blob(block) or b"") == STATE for block in blocks)
    assert not fetch.bad


def test_a_missing_block_is_reported_as_bad_with_a_reason(lower: Place) -> None:
    block = child(root(), 1)
    lower.tier.adopt(block, block.kind)  # an index that says more than there is
    fetch = lower.read(block)
    assert not fetch.records
    assert fetch.bad[block.key]


@pytest.mark.parametrize("state", ["full", "failing"])
def test_a_failed_write_is_reported_with_its_reason(lower: Place, state: TierState) -> None:
    assert lower.failing is not None
    block = child(root(), 1)
    with lower.failing(state):
        lower.tier.put(block, STATE)
        lower.flush()
    [event] = [each for each in lower.reported if isinstance(each, WriteFailed)]
    assert (event.tier, event.state, event.is_there) == (lower.tier.name, state, False)
    assert [write.key for write in event.writes] == [block.key]
    assert event.reason
    assert block.copies[lower.tier.name].written is None
    assert lower.tier.pending_bytes == 0


@pytest.mark.parametrize("state", ["full", "failing"])
def test_after_a_failure_a_tier_takes_less_or_nothing_until_a_retry(
    lower: Place, state: TierState
) -> None:
    assert lower.failing is not None
    first, second = child(root(), 1), child(root(), 2)
    lower.tier.put(first, STATE)
    lower.flush()
    with lower.failing(state):
        lower.tier.put(second, STATE)
        lower.flush()
    [event] = [each for each in lower.reported if isinstance(each, WriteFailed)]
    lower.tier.remove(second)
    lower.tier.fail(event)
    assert lower.tier.state == state
    assert lower.tier.takes_writes == (state == "full")
    assert state == "failing" or not lower.tier.budget.fits(0)
    lower.tier.retry()
    assert (lower.tier.state, lower.tier.takes_writes) == ("ok", True)
    assert lower.tier.budget.fits(lower.tier.cost(second.tokens, len(STATE)))
    assert lower.state_of(first) == STATE


def test_a_failed_replacement_keeps_the_old_copy(lower: Place) -> None:
    assert lower.failing is not None
    block = child(root(), 1)
    lower.tier.put(block, STATE)
    lower.flush()
    before = block.kind
    with lower.failing("failing"):
        block.kind = BlockKind(len(BETTER), True, True)
        lower.tier.put(block, BETTER)
        lower.flush()
    assert block.copies[lower.tier.name].written == before
    block.kind = before
    lower.tier.resize(block, before)
    assert lower.tier.budget.used_bytes == lower.tier.cost(block.tokens, len(STATE))
    assert lower.state_of(block) == STATE


def test_the_queue_has_room_up_to_its_limit(tmp_path: Path) -> None:
    events: SimpleQueue[TierEvent] = SimpleQueue()
    folder = open_folder(tmp_path, b"model", limit_bytes=1 << 30)
    tiers: list[Tier] = [
        DiskTier(folder, events.put, queue_bytes=1),
        MemoryTier(PLENTY_BYTES, events.put, queue_bytes=1),
    ]
    for tier in tiers:
        assert tier.has_queue_room
        tier.put(child(root(), 1), STATE)
        assert not tier.has_queue_room
        Place(tier, events, None).flush()
        assert tier.has_queue_room
        tier.close()


@pytest.mark.parametrize("kind", KINDS[1:], ids=lambda kind: kind.__name__)
def test_stored_blocks_are_listed_parents_first_when_the_tier_is_opened(
    kind: Callable[[Path, int], Place], tmp_path: Path
) -> None:
    place = kind(tmp_path, PLENTY_BYTES)
    parent = child(root(), 1)
    block, unwanted = child(parent, 2), child(root(STRANGER), 3)
    for each in (parent, block, unwanted):
        place.tier.put(each, STATE)
    place.flush()
    place.tier.close()
    again = kind(tmp_path, PLENTY_BYTES)
    if isinstance(place.tier, MemoryTier) and isinstance(again.tier, MemoryTier):
        again.tier.shelf = place.tier.shelf
    found = list(again.tier.stored())
    assert [each.key for each in found] == [parent.key, block.key, unwanted.key]
    assert [each.tokens.ids() for each in found] == [[1], [2], [3]]
    assert found[1].parent == parent.key
    assert {each.kind for each in found} == {block.kind}
    assert again.tier.budget.used_bytes == 0
    again.tier.discard(unwanted.key)
    fresh = child(root(), 1)
    again.tier.adopt(fresh, found[0].kind)
    assert again.tier.holds(fresh)
    assert again.tier.budget.used_bytes == again.tier.cost(fresh.tokens, len(STATE))
    assert again.state_of(fresh) == STATE
    again.flush()
    assert [each.key for each in again.tier.stored()] == [parent.key, block.key]
    again.tier.close()


def test_ram_is_empty_when_it_is_opened() -> None:
    assert list(RamTier(PLENTY_BYTES).stored()) == []


def test_tier_names_differ_and_only_ram_is_not_persistent(tmp_path: Path) -> None:
    places = [kind(tmp_path, PLENTY_BYTES) for kind in KINDS]
    assert len({place.tier.name for place in places}) == len(places)
    assert [place.tier.persistent for place in places] == [False, True, True]
    for place in places:
        place.tier.close()
