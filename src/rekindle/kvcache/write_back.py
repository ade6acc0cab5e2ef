"""What goes from RAM down to the disk: which block, when, and at whose cost."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from rekindle.kvcache.block import Block, Wish, chain
from rekindle.kvcache.tiers.disk import DiskTier
from rekindle.kvcache.tiers.disk import disk_bytes as disk_cost
from rekindle.kvcache.tiers.ram import Blob, RamTier
from rekindle.kvcache.tree import Index


class Spill:
    """Decides what is written; the disk is closed under parents, so they always go first."""

    def __init__(
        self, index: Index, ram: RamTier, disk: DiskTier, evict: Callable[[Block], None]
    ) -> None:
        self._index = index
        self._ram = ram
        self._disk = disk
        self._evict = evict  # forgets a block altogether
        self._dirty: deque[Block] = deque()  # to be written as soon as the queue has room

    def plan(self, block: Block) -> None:
        """Have a block written when it wishes. Tails wait in any case: the next turn makes a
        longer one of most of them."""
        soon = block.wish is Wish.SOON and self._index.is_full(block)
        if soon and not block.disk_bytes and self._disk.takes_writes:
            self._dirty.append(block)

    def feed(self) -> None:
        """Hand the writer as much as it takes."""
        while self._dirty and self._disk.takes_writes and self._disk.has_queue_room:
            block = self._dirty.popleft()
            if self._index.get(block.key) is block:
                self.write(block)

    def write(self, block: Block, last: Block | None = None) -> bool:
        """Have a block written, after those above it that are not; False: it cannot be. Room for
        it is not made at the cost of `last`."""
        if not self._disk.takes_writes:
            return False
        missing = [each for each in chain(block) if not each.disk_bytes]
        for each in reversed(missing):
            blob = self._ram.get(each)
            if blob is None or (each.wish is Wish.NEVER and each is not block):
                return False
            if not self.make_room(disk_cost(each.packed, len(blob)), last):
                return False
            self._disk.write(each, blob)
        return True

    def demote(self, block: Block, last: Block | None) -> bool:
        """Have it written instead of lost; not when the writer cannot keep up, for what waits for
        it takes memory too."""
        if block.disk_bytes:
            return True
        return block.wish > Wish.NEVER and self._disk.has_queue_room and self.write(block, last)

    def takes_again(self, block: Block, blob: Blob, in_ram: bool) -> bool:
        """Whether the disk has room for a block that it holds, as it has become; what RAM does not
        hold, too, waits for the writer in memory."""
        more = disk_cost(block.packed, len(blob)) - block.disk_bytes
        return (in_ram or self._disk.has_queue_room) and self.make_room(more, block)

    def takes(self, above: Block | None, packed: bytes, blob: Blob, wish: Wish) -> bool:
        """Whether the disk takes a new block that RAM has no room for; if so there is room."""
        return (
            wish > Wish.NEVER
            and self._disk.takes_writes
            and self._disk.has_queue_room
            and (above is None or self.write(above))
            and self.make_room(disk_cost(packed, len(blob)), above)
        )

    def write_everything(self) -> None:
        """Have all written that may be; the order of the index is parents first."""
        for block in list(self._index):
            if block.wish > Wish.NEVER and self._index.get(block.key) is block:
                self.write(block)

    def catch_up(self) -> None:
        """Plan again what a disk that had failed has missed."""
        self._dirty.clear()
        for block in self._index:
            self.plan(block)
        self.feed()

    def make_room(self, cost: int, last: Block | None = None) -> bool:
        """Empty the disk of leaves, not at the cost of `last` or of pins."""
        if not self._disk.could_fit(cost):
            return False
        spared = Spared(self._index, last, in_ram=False)
        while not self._disk.fits(cost):
            key = self._disk.lowest(spared)
            block = self._index.get(key) if key is not None else None
            if block is None:
                return False
            if block in self._ram:
                self._disk.remove(block)
                block.wish = Wish.NEVER  # or it would come straight back
            else:
                self._evict(block)
        return True


class Spared:
    """What may not go now: the block being added to, and what is pinned. RAM may let go of what the
    disk has; the disk lets go of nothing that others depend on."""

    def __init__(self, index: Index, last: Block | None, *, in_ram: bool) -> None:
        self._index = index
        self._last = last
        self._in_ram = in_ram

    def __contains__(self, key: object) -> bool:
        assert isinstance(key, bytes)
        block = self._index.get(key)
        if block is None:
            return True
        if self._in_ram and (block.stored or (block.disk_bytes and not block.is_pinned)):
            return False
        needed = block is self._last or block.is_pinned
        return needed or (not self._in_ram and bool(block.children))
