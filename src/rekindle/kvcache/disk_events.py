"""What the disk has done in the meantime, and what becomes of the blocks it was asked about."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rekindle.kvcache.block import Block, Kind, below
from rekindle.kvcache.disk.writer import Flushed, Unwritten, Written
from rekindle.kvcache.tiers.disk import DiskTier, Fetch, Fetched, News
from rekindle.kvcache.tiers.disk import disk_bytes as disk_cost
from rekindle.kvcache.tiers.ram import RamTier, cost_bytes
from rekindle.kvcache.tree import Index
from rekindle.kvcache.write_back import Spill

if TYPE_CHECKING:  # the store listens through this
    from rekindle.kvcache.store import Store


class Listener:
    """Called by the engine's thread, with what the disk's own threads told it."""

    def __init__(
        self, store: Store, index: Index, ram: RamTier, disk: DiskTier, spill: Spill
    ) -> None:
        self._store = store
        self._index = index
        self._ram = ram
        self._disk = disk
        self._spill = spill

    def hear(self, news: News) -> None:
        """Take it in."""
        match news:
            case Written():
                self._on_written(news)
            case Unwritten():
                self._on_unwritten(news)
            case Fetched(fetch):
                self._on_fetched(fetch)
            case Flushed(then):
                then()

    def _on_written(self, news: Written) -> None:
        self._disk.counts.written_bytes += sum(order.size_bytes for order in news.orders)
        for order in news.orders:  # of one that was overtaken since, too
            if (block := self._index.get(order.key)) and block.stored:
                record = order.record
                block.filed = Kind(len(record.blob), record.exact, record.resumable)
        for order in self._disk.settle(news.orders):
            if block := self._index.get(order.key):
                block.filed = block.kind
                self._store.let_give_way(block)
        self._spill.feed()

    def _on_unwritten(self, news: Unwritten) -> None:
        """These are not on disk, so nothing below them is reachable there either."""
        for order in self._disk.settle(news.orders):
            block = self._index.get(order.key)
            if block is not None and block.stored:
                self._fall_back(block, block.kind if news.filed else block.filed)
            elif block is not None:
                if self._ram.fits(cost_bytes(order.record.blob, block.packed)):
                    self._store.promote(block, order.record.blob)  # it may have left RAM too early
                self._leave_disk(block)
        self._disk.shrink(news.state, sum(order.size_bytes for order in news.orders))
        self._spill.make_room(0)

    def _fall_back(self, block: Block, filed: Kind | None) -> None:
        """A block is again what its file holds: the one it had before stands, or the new one does
        and the index will be told so when it is opened."""
        assert filed is not None
        block.kind = block.filed = filed
        self._disk.resize(block, disk_cost(block.packed, filed.size_bytes))
        blob = self._ram.get(block)
        if blob is not None and len(blob) > filed.size_bytes:  # a checkpoint comes after the cells
            self._ram.put(block, bytes(blob[: filed.size_bytes]))

    def _leave_disk(self, block: Block) -> None:
        """What RAM holds stays, unless something above it is nowhere any more."""
        found = below(block)
        kept: set[Block | None] = {block.parent}
        for each in reversed(found):  # parents first
            if each in self._ram and each.parent in kept:
                kept.add(each)
        for each in found:
            if each in kept:
                self._disk.remove(each)
            else:
                self._store.remove(each)

    def _on_fetched(self, fetch: Fetch) -> None:
        fetch.done = True
        for key, record in list(fetch.records.items()):
            self._disk.counts.read_bytes += len(record.blob)
            block = fetch.blocks[key]
            if block.kind != fetch.kinds[key]:  # it was replaced while it was read
                del fetch.records[key]
                continue
            if not self._is_on_disk(block):
                continue
            if block.packed != record.packed or block.root != record.root:
                fetch.bad[key] = "it holds other tokens"
            elif record.exact < block.exact or record.resumable != block.resumable:
                fetch.bad[key] = "it is older than its index says"
            else:
                self._store.promote(block, record.blob)
        for key in list(fetch.bad):
            fetch.records.pop(key, None)
            block = fetch.blocks[key]
            if self._is_on_disk(block) and block.kind == fetch.kinds[key]:
                self._disk.counts.corrupt_blocks += 1
                self._store.drop(block, aside=True)
            else:
                del fetch.bad[key]  # it left while it was read: no fault of its file

    def _is_on_disk(self, block: Block) -> bool:
        """Whether its file is the block's, now and for good."""
        known = self._index.get(block.key) is block
        return known and bool(block.disk_bytes) and self._disk.queued(block) is None
