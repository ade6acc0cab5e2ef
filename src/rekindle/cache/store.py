"""The store: what has been computed, by the tokens it was computed from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rekindle.cache.evict import Ranking
from rekindle.cache.index import Block, Index, Match
from rekindle.cache.key import chain_key
from rekindle.cache.ram import RamTier, cost_bytes


@dataclass(slots=True)
class StoreCounts:
    """What the store has done since it was opened."""

    stored_blocks: int = 0
    stored_bytes: int = 0
    evicted_blocks: int = 0
    refused_blocks: int = 0


class Store:
    """Blocks under a byte budget; leaves go first, so a stored block is always reachable."""

    def __init__(self, *, block_tokens: int, ram_bytes: int) -> None:
        self._index = Index(block_tokens)
        self._ram = RamTier(ram_bytes)
        self._ranking = Ranking()
        self.counts = StoreCounts()

    def __len__(self) -> int:
        return len(self._index)

    @property
    def used_bytes(self) -> int:
        return self._ram.used_bytes

    @property
    def limit_bytes(self) -> int:
        return self._ram.limit_bytes

    def match(self, root: bytes, packed: bytes) -> Match:
        """The longest stored prefix; changes nothing."""
        return self._index.match(root, packed)

    def get(self, block: Block) -> bytes | None:
        """The block's state, or nothing when it has left since it was matched."""
        return self._ram.get(block.key) if self._index.get(block.key) is block else None

    def use(self, blocks: Iterable[Block]) -> None:
        """Count a use of these blocks."""
        self._ranking.use(block.key for block in blocks)

    def wants(self, parent: bytes, packed: bytes, *, exact: bool) -> bool:
        """Whether putting this block would add anything."""
        known = self._index.get(chain_key(parent, packed))
        if known is not None and known.holds(parent, packed):
            return exact and not known.exact
        return not self._covers(parent, packed, exact=exact)

    def put(self, root: bytes, parent: bytes, packed: bytes, blob: bytes, *, exact: bool) -> bool:
        """Keep a block under its parent. False: the parent is gone, or there is no room for it."""
        if known := self._index.get(chain_key(parent, packed)):
            return known.holds(parent, packed) and self._replace(known, blob, exact=exact)
        if self._covers(parent, packed, exact=exact):
            return True
        above = None if parent == root else self._index.get(parent)
        if parent != root and (above is None or not self._index.is_full(above)):
            return False
        return self._add(root, above, packed, blob, exact=exact)

    def _covers(self, parent: bytes, packed: bytes, *, exact: bool) -> bool:
        """Whether a longer block holds these tokens too, and as exactly as wanted."""
        return any(block.exact or not exact for block in self._index.longer(parent, packed))

    def _add(
        self, root: bytes, above: Block | None, packed: bytes, blob: bytes, *, exact: bool
    ) -> bool:
        cost = cost_bytes(blob, packed)
        if not self._make_room(cost, above):
            return False
        block = self._index.add(root, above, packed, cost, exact=exact)
        self._ram.put(block.key, blob, cost)
        self._ranking.enter(block.key, above.key if above else None)
        self._settle(block, blob)
        return True

    def _replace(self, known: Block, blob: bytes, *, exact: bool) -> bool:
        """An exact block takes the place of one that is not; never the other way round."""
        if known.exact or not exact:
            return True
        cost = cost_bytes(blob, known.packed)
        if not self._make_room(cost - known.size_bytes, known):
            return False
        self._ram.put(known.key, blob, cost)
        known.size_bytes, known.exact = cost, True
        self._settle(known, blob)
        return True

    def _settle(self, block: Block, blob: bytes) -> None:
        """Count a block that has just come, and let go of the tails it covers."""
        self.counts.stored_blocks += 1
        self.counts.stored_bytes += len(blob)
        for covered in self._index.shorter(block):
            if block.exact or not covered.exact:
                self._remove(covered)

    def drop(self, block: Block) -> None:
        """Forget a block that turned out bad, and everything that was computed on top of it."""
        if self._index.get(block.key) is not block:
            return
        below = [block]
        for parent in below:  # grows as it is walked: parents first
            below.extend(parent.children.values())
        for each in reversed(below):
            self._remove(each)

    def _make_room(self, cost: int, last: Block | None) -> bool:
        """Evict leaves outside the chain that ends in `last`, or none when that would not do."""
        if self._ram.fits(cost):
            return True
        if cost + sum(block.size_bytes for block in _chain(last)) > self._ram.limit_bytes:
            self.counts.refused_blocks += 1
            return False
        spared = {last.key} if last else set()  # and with it all above it: only leaves go
        while not self._ram.fits(cost):
            key = self._ranking.evict(spared)
            block = self._index.get(key) if key is not None else None
            assert block is not None, "what is not of the chain can be evicted"
            self._remove(block)
            self.counts.evicted_blocks += 1
        return True

    def _remove(self, block: Block) -> None:
        self._index.remove(block)
        self._ram.drop(block.key)
        self._ranking.leave(block.key)


def _chain(block: Block | None) -> Iterator[Block]:
    """This block and those above it, the root left out."""
    while block is not None and not block.is_root:
        yield block
        block = block.parent
