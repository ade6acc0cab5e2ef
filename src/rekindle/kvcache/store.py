"""The store: what has been computed, by the tokens it was computed from, in RAM and on disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from rekindle.kvcache.block import Block, Kind, Wish, below, chain
from rekindle.kvcache.codec import record_bytes
from rekindle.kvcache.disk.index_db import BlockRow
from rekindle.kvcache.disk_events import Listener
from rekindle.kvcache.handles import Head
from rekindle.kvcache.key import TOKEN_BYTES, chain_key
from rekindle.kvcache.tiers.disk import DiskTier, Fetch, News
from rekindle.kvcache.tiers.disk import disk_bytes as disk_cost
from rekindle.kvcache.tiers.ram import OVERHEAD_BYTES, Blob, RamTier, cost_bytes
from rekindle.kvcache.tree import Index, Match
from rekindle.kvcache.write_back import Spared, Spill


@dataclass(slots=True)
class StoreCounts:
    """What the store has done since it was opened."""

    stored_blocks: int = 0
    stored_bytes: int = 0
    evicted_blocks: int = 0
    refused_blocks: int = 0
    evicted: Counter[bytes] = field(default_factory=Counter)  # blocks, by tenant


class Store:
    """Blocks under byte budgets; leaves go first, so a stored block is always reachable.

    A block is in the tree as long as one tier holds it. The disk is closed under parents: a block
    is written after its parent and leaves before it. Called by the engine's thread only.
    """

    def __init__(self, *, block_tokens: int, ram_bytes: int, disk: DiskTier | None = None) -> None:
        self._index = Index(block_tokens)
        self._ram = RamTier(ram_bytes)
        self._disk = disk
        self._spill: Spill | None = None
        self._listener: Listener | None = None
        if disk is not None:
            self._spill = Spill(self._index, self._ram, disk, self._evict)
            self._listener = Listener(self, self._index, self._ram, disk, self._spill)
        self.counts = StoreCounts()

    def __len__(self) -> int:
        return len(self._index)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._index)

    @property
    def used_bytes(self) -> int:
        return self._ram.used_bytes

    @property
    def limit_bytes(self) -> int:
        return self._ram.limit_bytes

    @property
    def disk(self) -> DiskTier | None:
        return self._disk

    def held_bytes(self, root: bytes | None) -> tuple[int, int]:
        """What a tenant holds of RAM and of disk, or all of them together."""
        if root is None:
            return self._ram.used_bytes, self._disk.used_bytes if self._disk else 0
        return self._ram.held_bytes(root), self._disk.held_bytes(root) if self._disk else 0

    def evictions(self, root: bytes | None) -> int:
        """Blocks a tenant lost to make room, or all of them together."""
        return self.counts.evicted_blocks if root is None else self.counts.evicted[root]

    # -- looking -------------------------------------------------------------------------------

    def match(self, root: bytes, packed: bytes) -> Match:
        """The longest stored prefix; changes nothing."""
        return self._index.match(root, packed)

    def knows(self, key: bytes) -> bool:
        """Whether a block has this key."""
        return self._index.get(key) is not None

    def get(self, block: Block) -> Blob | None:
        """The block's state if it is at hand; what lies on disk has to be fetched first."""
        if self._index.get(block.key) is not block:
            return None
        blob = self._ram.get(block)
        return self._disk.queued(block) if blob is None and self._disk else blob

    def use(self, blocks: Iterable[Block], wish: Wish = Wish.NEVER) -> None:
        """Count a use of these blocks; one that wishes them kept longer has its way."""
        for block in blocks:
            if self._index.get(block.key) is not block:
                continue
            self._ram.use(block)
            if self._disk:
                self._disk.use(block)
            if wish > block.wish:
                self._wish(block, wish)

    def checkpoints(self, root: bytes, packed: bytes) -> Iterator[Block]:
        """Blocks with a checkpoint from which these tokens go on, the longest prefix first."""
        return self._index.checkpoints(root, packed)

    def wants(self, parent: bytes, packed: bytes, *, exact: bool, resumable: bool = False) -> bool:
        """Whether putting this block would add anything."""
        known = self._index.get(chain_key(parent, packed))
        if known is not None and known.holds(parent, packed):
            return _is_better(known, exact=exact, resumable=resumable)
        return resumable or not self._covers(parent, packed, exact=exact)

    def _covers(self, parent: bytes, packed: bytes, *, exact: bool) -> bool:
        """Whether a longer block holds these tokens too, and as exactly as wanted."""
        return any(block.exact or not exact for block in self._index.longer(parent, packed))

    # -- putting -------------------------------------------------------------------------------

    def put(
        self,
        root: bytes,
        parent: bytes,
        packed: bytes,
        blob: Blob,
        *,
        exact: bool,
        resumable: bool = False,
        wish: Wish = Wish.NEVER,
    ) -> bool:
        """Keep a block under its parent. False: the parent is gone, or there is no room for it."""
        if known := self._index.get(chain_key(parent, packed)):
            better = _is_better(known, exact=exact, resumable=resumable)
            return known.holds(parent, packed) and (
                not better or self._replace(known, blob, exact=exact, resumable=resumable)
            )
        if not resumable and self._covers(parent, packed, exact=exact):
            return True
        above = None if parent == root else self._index.get(parent)
        if parent != root and (above is None or not self._index.is_full(above)):
            return False
        in_ram = self._make_room(cost_bytes(blob, packed), above)
        if not in_ram and not (self._spill and self._spill.takes(above, packed, blob, wish)):
            self.counts.refused_blocks += 1
            return False
        block = self._index.add(root, above, packed, len(blob), exact=exact, resumable=resumable)
        if in_ram:
            self._ram.put(block, blob)
        elif self._disk:
            self._disk.write(block, blob)
        self._settle(block, blob)
        self._wish(block, wish)
        return True

    def wish_for(self, key: bytes, wish: Wish) -> None:
        """Have a block that is here already kept as long as this."""
        block = self._index.get(key)
        if block is not None and wish > block.wish:
            self._wish(block, wish)

    @property
    def is_congested(self) -> bool:
        """Whether the disk's writer has as much before it as it may."""
        return self._disk is not None and not self._disk.has_queue_room

    def _wish(self, block: Block, wish: Wish) -> None:
        block.wish = wish
        if self._spill:
            self._spill.plan(block)
            self._spill.feed()

    def _replace(self, known: Block, blob: Blob, *, exact: bool, resumable: bool) -> bool:
        """A better block takes the place of one that is here."""
        cost = cost_bytes(blob, known.packed)
        in_ram = self._make_room(cost - self._ram.cost(known), known)
        if in_ram and known not in self._ram:  # what it took before may be what made room
            in_ram = self._make_room(cost, known)
        if not in_ram and (known in self._ram or not known.disk_bytes):
            self.counts.refused_blocks += 1
            return False
        if self._spill and known.disk_bytes and not self._spill.takes_again(known, blob, in_ram):
            self.counts.refused_blocks += 1
            return False
        known.kind = Kind(len(blob), exact, resumable)
        if in_ram:
            self._ram.put(known, blob)
        if known.disk_bytes and self._disk:
            self._disk.write(known, blob)
        self._settle(known, blob)
        return True

    def _settle(self, block: Block, blob: Blob) -> None:
        """Count a block that has just come, let go of the tails it covers, and let the
        conversations that go through it end there."""
        self.counts.stored_blocks += 1
        self.counts.stored_bytes += len(blob)
        self.let_give_way(block)

    def let_give_way(self, block: Block) -> None:
        """Let go of the tails that a block covers; of one on disk, not before the block is there,
        and never of a pinned one, which was promised, or of one with a checkpoint."""
        for covered in self._index.shorter(block):
            replaced = (block.exact or not covered.exact) and not covered.resumable
            needed = covered.disk_bytes and not block.stored
            if replaced and not needed and not covered.is_pinned:
                self.remove(covered)
        self._descend(block)

    def _descend(self, block: Block) -> None:
        """Conversations that end above a new block, or in a tail beside it, may go through it; and
        one that a longer block holds may end in it, if it has its checkpoint."""
        above = block.parent
        assert above is not None
        beside = [head for tail in self._index.shorter(block) for head in tail.heads]
        if block.resumable:
            longer = self._index.longer(above.key, block.packed)
            beside += [head for other in longer for head in other.heads]
        for head in (*above.heads.along(block.packed), *beside):
            self._index.place(head, above)

    def promote(self, block: Block, blob: Blob) -> None:
        """Keep in RAM what was fetched from below, if there is room."""
        if block not in self._ram and self._make_room(cost_bytes(blob, block.packed), block):
            self._ram.put(block, blob)

    # -- heads ---------------------------------------------------------------------------------

    def attach(self, head: Head) -> None:
        """Let a conversation's end rest on the last block that holds state of it."""
        self._index.place(head)

    def detach(self, head: Head) -> None:
        """Forget a conversation's end; its state stays until room is needed."""
        self._index.lift(head)

    def release(self, head: Head) -> int:
        """Forget a conversation's end and all state that is no other's; the bytes freed."""
        block, top = head.block, None
        self.detach(head)
        while block is not None and not block.is_root and not _is_wanted(block, top):
            block, top = block.parent, block
        gone = below(top) if top else []
        for each in gone:
            self.remove(each)
        if block is not None:
            gone += self._clear_along(block, head.packed)
        return sum(each.size_bytes for each in gone)

    def _clear_along(self, node: Block, packed: bytes) -> list[Block]:
        """Remove what lies under a block along a conversation that is gone, unless another goes
        through it."""
        gone = []
        for child in self._index.along(node, packed):
            longer = self._index.longer(node.key, child.packed)
            if not any(each.heads for other in (child, *longer) for each in below(other)):
                gone += below(child)
                for each in below(child):
                    self.remove(each)
        return gone

    def lasting_bytes(
        self, heads: Iterable[Head], token_bytes: int, checkpoint_bytes: int = 0
    ) -> int:
        """What these conversations take of the lowest tier, once computed, each with a checkpoint
        of its end; what they share counts once."""
        costs: dict[bytes, int] = {}
        for head in heads:
            key = head.root
            blocks = self._index.split(head.packed)
            for packed in blocks:
                key = chain_key(key, packed)
                state = len(packed) // TOKEN_BYTES * token_bytes
                costs[key] = max(costs.get(key, 0), self._cost_of(packed, state))
            if blocks:
                costs[key] = self._cost_of(blocks[-1], state + checkpoint_bytes)
        return sum(costs.values())

    def _cost_of(self, packed: bytes, state_bytes: int) -> int:
        if self._disk:
            return disk_cost(packed, state_bytes)
        return state_bytes + len(packed) + OVERHEAD_BYTES

    @property
    def pin_limit_bytes(self) -> int:
        """What pins may take: they rest on the lowest tier there is."""
        return self._disk.limit_bytes if self._disk else self._ram.limit_bytes

    # -- dropping ------------------------------------------------------------------------------

    def drop(self, block: Block, *, aside: bool = False) -> None:
        """Forget a block that turned out bad, and everything that was computed on top of it."""
        if self._index.get(block.key) is not block:
            return
        for each in below(block):
            self.remove(each, aside=aside and each is block)

    def remove(self, block: Block, *, aside: bool = False) -> None:
        """Forget a leaf of the tree."""
        above = block.parent
        assert above is not None
        self._ram.drop(block)
        if self._disk:
            self._disk.remove(block, aside=aside)
        self._index.remove(block)
        for head in block.heads:  # they end above now, or in a sibling that holds their tokens
            self._index.place(head, above)

    def _evict(self, block: Block) -> None:
        self.counts.evicted_blocks += 1
        self.counts.evicted[block.root] += 1
        self.remove(block)

    # -- making room ---------------------------------------------------------------------------

    def _make_room(self, cost: int, last: Block | None) -> bool:
        """Empty RAM of leaves, not of what `last` rests on unless the disk has it, or of none when
        that would not do. What may be written goes to disk."""
        if self._ram.fits(cost):
            return True
        if last is not None and self._spill:
            self._spill.demote(last, last)  # then its chain may leave RAM too
        kept = (block for block in chain(last) if not block.disk_bytes)
        if cost + sum(self._ram.cost(block) for block in kept) > self._ram.limit_bytes:
            return False
        spared = Spared(self._index, last, in_ram=True)
        while not self._ram.fits(cost):
            key = self._ram.lowest(spared)
            block = self._index.get(key) if key is not None else None
            if block is None:  # all that is left is pinned
                return False
            if self._spill and self._spill.demote(block, last):
                self._ram.drop(block)
            else:
                self._evict(block)
        return True

    # -- the disk ------------------------------------------------------------------------------

    def load(self, rows: Iterable[BlockRow]) -> None:
        """Take in what the disk holds, parents first; a row that cannot be right is left out."""
        assert self._disk is not None
        assert self._spill is not None
        for row in rows:
            above = None if row.parent == row.root else self._index.get(row.parent)
            state_bytes = row.size_bytes - record_bytes(len(row.packed), 0)
            if not self._is_sound(row, above) or state_bytes < 0:
                self._disk.discard(row.key)
                continue
            block = self._index.add(
                row.root,
                above,
                row.packed,
                state_bytes,
                exact=row.exact,
                resumable=row.resumable,
            )
            block.wish = Wish.SOON
            self._disk.adopt(block, disk_cost(row.packed, state_bytes))
            self.let_give_way(block)
        self._spill.make_room(0)  # the budget may have become smaller

    def _is_sound(self, row: BlockRow, above: Block | None) -> bool:
        fits_in = above is not None and self._index.is_full(above) and above.root == row.root
        return (
            (row.parent == row.root or fits_in)
            and self._index.could_hold(row.packed)
            and self._index.get(row.key) is None
            and chain_key(row.parent, row.packed) == row.key
        )

    def write_chain(self, block: Block) -> None:
        """Have a conversation written whole, its tail too."""
        for each in chain(block):
            each.wish = max(each.wish, Wish.LATE)
        if self._spill:
            self._spill.write(block)

    def write_everything(self) -> None:
        """Have all written that may be."""
        if self._spill:
            self._spill.write_everything()

    def fetch(self, blocks: Sequence[Block]) -> Fetch | None:
        """Start reading those that are not at hand; None when all are."""
        missing = [block for block in blocks if block.disk_bytes and self.get(block) is None]
        return self._disk.read(missing) if missing and self._disk else None

    def hear(self, news: News) -> None:
        """Take in what the disk has done in the meantime."""
        assert self._listener is not None
        self._listener.hear(news)

    def retry_disk(self) -> None:
        """Try a disk again that had failed, and write what it missed."""
        if self._disk and self._spill and self._disk.state != "ok":
            self._disk.try_again()
            self._spill.catch_up()


def _is_better(known: Block, *, exact: bool, resumable: bool) -> bool:
    """Whether a block like this adds something to the known one, and takes nothing from it."""
    adds = exact > known.exact or resumable > known.resumable
    return adds and exact >= known.exact and resumable >= known.resumable


def _is_wanted(block: Block, known: Block | None) -> bool:
    """Whether a conversation ends in this block or below it; in its child `known` none does."""
    others = (child for child in block.children.values() if child is not known)
    return bool(block.heads) or any(each.heads for child in others for each in below(child))
