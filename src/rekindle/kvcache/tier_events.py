"""What tiers have done in the meantime, and what becomes of the blocks they were asked about."""

from __future__ import annotations

from rekindle.kvcache.block import Block, BlockKind
from rekindle.kvcache.fetches import Fetches
from rekindle.kvcache.placement import Placement
from rekindle.kvcache.tiered import TieredTree
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
from rekindle.kvcache.write_back import WriteBackQueue


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
