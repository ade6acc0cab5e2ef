"""Reads from lower tiers: a window of blocks at a time, so that what they take is bounded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

from rekindle.kvcache.block import Block, BlockKind
from rekindle.kvcache.placement import Placement, WriteBackQueue
from rekindle.kvcache.tiered import TieredTree, Tiers
from rekindle.kvcache.tiers.base import (
    Fetch,
    Fetched,
    Flushed,
    Found,
    Tier,
    TierEvent,
    Write,
    WriteFailed,
    Written,
    serves,
)

WINDOWS = 4  # of a tier's share, in which windows are cut
WINDOW_BYTES = 64 << 20  # at most, unless one block has more: what is read first is restored first
TURNS = 2  # that a tier reads for at once; others wait until there is room


class Fetches:
    """Each lower tier has a share of the limit, so that one that hangs holds up no other. A block
    larger than all of it is read alone. Called by the engine's thread only."""

    def __init__(self, tiers: Tiers, limit_bytes: int) -> None:
        self._tiers = tiers
        self.limit_bytes = limit_bytes
        self._tier_bytes = limit_bytes // max(len(tiers) - 1, 1)
        self.turn_bytes = self._tier_bytes // TURNS  # that a turn has read ahead
        self._in_flight: dict[str, set[Fetch]] = {tier.name: set() for tier in tiers}
        self._late: Counter[str] = Counter()  # reads that were given up and have not ended
        #: Called with a tier that has stopped answering reads, or that answers again.
        self.on_change: Callable[[Tier, bool], None] = lambda tier, answers: None

    @property
    def used_bytes(self) -> int:
        """What all fetches take of memory, from their start to their release."""
        return sum(map(self._used_bytes, self._in_flight))

    def _used_bytes(self, tier: str) -> int:
        return sum(fetch.size_bytes for fetch in self._in_flight[tier])

    def answers(self, tier: Tier) -> bool:
        """Whether no read of a tier is overdue."""
        return not self._late[tier.name]

    def is_readable(self, block: Block) -> bool:
        """Whether a block is at hand, or can be had from a tier that answers."""
        return self._tiers.get(block) is not None or self._source(block) is not None

    def _source(self, block: Block) -> Tier | None:
        return next((t for t in self._tiers if t.holds(block) and self.answers(t)), None)

    # -- a fetch, from start to release ----------------------------------------------------------

    def start(self, blocks: Sequence[Block]) -> Fetch | None:
        """Start reading a window: the first of these that are not at hand and have the same source.
        None: none is missing, none can be had, or there is no room for one now."""
        missing = (block for block in blocks if self._tiers.get(block) is None)
        first = next(missing, None)
        tier = self._source(first) if first is not None else None
        if first is None or tier is None:
            return None
        window = list(self._window(tier, chain([first], missing)))
        if not window:
            return None
        fetch = Fetch.of(tier.name, window)
        self._in_flight[tier.name].add(fetch)
        tier.read(window, fetch)
        return fetch

    def _window(self, tier: Tier, missing: Iterable[Block]) -> Iterator[Block]:
        room_bytes = self._tier_bytes - self._used_bytes(tier.name)
        may_exceed = not self._in_flight[tier.name]
        window_bytes = 0
        for block in missing:
            room_bytes -= block.size_bytes
            window_bytes += block.size_bytes
            is_first = window_bytes == block.size_bytes
            if self._source(block) is not tier or (
                room_bytes < 0 and not (is_first and may_exceed)
            ):
                return
            if not is_first and window_bytes > min(self._tier_bytes // WINDOWS, WINDOW_BYTES):
                return
            yield block

    def abandoned(self, block: Block) -> list[Fetch]:
        """Reads that nobody waits for, where they alone take the room that a block's would."""
        tier = self._source(block)
        in_flight = self._in_flight[tier.name] if tier else set()
        return list(in_flight) if all(fetch.is_released for fetch in in_flight) else []

    def release(self, fetch: Fetch) -> None:
        """Nobody wants these bytes any more. What is being read takes memory until it is."""
        fetch.is_released = True
        if fetch.is_done:
            self._forget(fetch)

    def give_up(self, fetch: Fetch) -> None:
        """Release a fetch that takes too long; its tier is left out until it has answered."""
        if not fetch.is_done and not fetch.is_late:
            fetch.is_late = True
            self._count_late(fetch, +1)
        self.release(fetch)

    def on_fetched(self, fetch: Fetch) -> None:
        """A tier has read all that it was asked for."""
        fetch.is_done = True
        if fetch.is_late:
            self._count_late(fetch, -1)
        if fetch.is_released:
            self._forget(fetch)

    def _count_late(self, fetch: Fetch, more: int) -> None:
        tier = next(tier for tier in self._tiers if tier.name == fetch.tier)
        answered = self.answers(tier)
        self._late[tier.name] += more
        if self.answers(tier) != answered:
            self.on_change(tier, not answered)

    def _forget(self, fetch: Fetch) -> None:
        """The one place where bytes stop being in flight."""
        self._in_flight[fetch.tier].discard(fetch)
        fetch.records.clear()


# ----------------------------------------------------------------------
# What tiers have done in the meantime, and what becomes of the blocks they were asked about.


class TierEvents:
    """Called by the engine's thread, with what the threads of the tiers reported."""

    def __init__(
        self,
        tiered: TieredTree,
        placement: Placement,
        write_back: WriteBackQueue,
        fetches: Fetches,
    ) -> None:
        self._tiered = tiered
        self._fetches = fetches
        self._tree = tiered.tree
        self._placement = placement
        self._write_back = write_back
        self._first = tiered.tiers[0]
        self._tiers = {tier.name: tier for tier in tiered.tiers}

    def on_event(self, event: TierEvent) -> None:
        match event:
            case Written():
                self._on_written(event)
            case WriteFailed():
                self._on_write_failed(event)
            case Fetched(fetch):
                self._on_fetched(fetch)
                self._fetches.on_fetched(fetch)
            case Flushed(then, is_safe):
                then(is_safe)
            case Found(name, blocks):
                self._tiered.take_in(self._tiers[name], blocks)

    # -- writes --------------------------------------------------------------------------------

    def _on_written(self, event: Written) -> None:
        tier = self._tiers[event.tier]
        for write in event.writes:  # of one that was overtaken since, too
            copy = block.copies.get(tier.name) if (block := self._tree.get(write.key)) else None
            if copy is not None and copy.written is not None:
                copy.written = write.kind
        for write in tier.complete(event):
            if block := self._tree.get(write.key):
                block.copies[tier.name].written = write.kind
                self._tiered.cover(block)
        self._write_back.feed()

    def _on_write_failed(self, event: WriteFailed) -> None:
        """These are not in the tier, so nothing below them is reachable there either."""
        tier = self._tiers[event.tier]
        for write in tier.complete(event):
            if block := self._tree.get(write.key):
                self._undo(tier, block, write, is_there=event.is_there)
        tier.fail(event)
        self._placement.make_room(tier, 0)

    def _undo(self, tier: Tier, block: Block, write: Write, *, is_there: bool) -> None:
        copy = block.copies.get(tier.name)
        if copy is None:  # it left with the block above it
            return
        if copy.written is not None:
            self._fall_back(tier, block, write.kind if is_there else copy.written)
            return
        blob = write.record.blob
        if self._first.budget.fits(self._first.cost(block.tokens, len(blob))):
            self._placement.promote(block, blob)  # it may have left too early
        self._tiered.leave(tier, block)

    def _fall_back(self, tier: Tier, block: Block, kind: BlockKind) -> None:
        """A copy is again what it was: the one before stands, or the new one does and the tier will
        know so when it is next opened. The block is what all its copies can serve."""
        self._tree.set_kind(block, block.kind.weaker(kind))
        block.copies[tier.name].written = kind
        tier.resize(block, kind)
        if self._first.holds(block):
            self._first.resize(block, block.kind)

    # -- reads ---------------------------------------------------------------------------------

    def _on_fetched(self, fetch: Fetch) -> None:
        """Keep what was read, also when nobody waits for it any more: it may be of use yet."""
        tier = self._tiers[fetch.tier]
        for key in list(fetch.records):
            self._take_in(tier, fetch, key)
        for key in list(fetch.bad):
            fetch.records.pop(key, None)
            block = fetch.blocks[key]
            if self._is_there(tier, block) and block.kind == fetch.kinds[key]:
                tier.counts.corrupt_blocks += 1
                self._tiered.leave(tier, block, quarantine=True)
            else:
                del fetch.bad[key]  # it left while it was read: no fault of its copy

    def _take_in(self, tier: Tier, fetch: Fetch, key: bytes) -> None:
        """Keep a record that was read, unless it is not what it should be."""
        block, record = fetch.blocks[key], fetch.records[key]
        tier.counts.read_bytes += len(record.blob)
        if block.kind != fetch.kinds[key]:  # it was replaced while it was read
            del fetch.records[key]
        elif not self._is_there(tier, block):
            return
        elif block.tokens != record.tokens or block.namespace != record.namespace:
            fetch.bad[key] = "it holds other tokens"
        elif not serves(record, block):
            fetch.bad[key] = "it is older than its index says"
        else:
            self._placement.promote(block, record.blob[: block.size_bytes])

    def _is_there(self, tier: Tier, block: Block) -> bool:
        """Whether a tier's copy is the block's, now and for good."""
        return self._tiered.knows(block) and tier.holds(block) and tier.get(block) is None
