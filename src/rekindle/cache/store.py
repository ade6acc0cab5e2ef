"""The store: what has been computed, by the tokens it was computed from."""

from __future__ import annotations

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
        return self._ram.get(block.key)

    def use(self, blocks: list[Block]) -> None:
        """Count a use of these blocks, first to last of one chain."""
        self._ranking.use([block.key for block in blocks])

    def wants(self, parent: bytes, packed: bytes, *, exact: bool) -> bool:
        """Whether putting this block would add anything."""
        known = self._index.get(chain_key(parent, packed))
        return known is None or (exact and not known.exact)

    def put(self, root: bytes, parent: bytes, packed: bytes, blob: bytes, *, exact: bool) -> bool:
        """Keep a block under its parent. False: the parent is gone, or there is no room for it."""
        key = chain_key(parent, packed)
        if known := self._index.get(key):
            return self._replace(known, blob, exact=exact)
        above = self._index.get(parent)
        if above is None and parent != root:
            return False
        chain = _chain(above)
        cost = cost_bytes(blob, packed)
        if not self._make_room(cost, spared=set(chain)):
            self.counts.refused_blocks += 1
            return False
        block = self._index.add(root, above, packed, cost, exact=exact)
        self._ram.put(key, blob, cost)
        self._ranking.enter(key, chain)
        self._count(blob)
        for covered in self._index.shorter(block):
            if not covered.children and (block.exact or not covered.exact):
                self._remove(covered)
        return True

    def _replace(self, known: Block, blob: bytes, *, exact: bool) -> bool:
        """An exact block takes the place of one that is not; never the other way round."""
        if exact and not known.exact:
            known.exact = True
            self._ram.put(known.key, blob, known.size_bytes)
            self._count(blob)
        return True

    def drop(self, block: Block) -> None:
        """Forget a block that turned out bad, and everything that was computed on top of it."""
        for child in list(block.children.values()):
            self.drop(child)
        self._remove(block)

    def _make_room(self, cost: int, *, spared: set[bytes]) -> bool:
        if cost > self._ram.limit_bytes:
            return False
        while not self._ram.fits(cost):
            key = self._ranking.evict(spared)
            if key is None:
                return False
            block = self._index.get(key)
            assert block is not None
            self._remove(block)
            self.counts.evicted_blocks += 1
        return True

    def _remove(self, block: Block) -> None:
        self._index.remove(block)
        self._ram.drop(block.key)
        self._ranking.leave(block.key)

    def _count(self, blob: bytes) -> None:
        self.counts.stored_blocks += 1
        self.counts.stored_bytes += len(blob)


def _chain(block: Block | None) -> list[bytes]:
    """Keys from the oldest ancestor down to this block, the root left out."""
    chain: list[bytes] = []
    while block is not None and not block.is_root:
        chain.append(block.key)
        block = block.parent
    return chain[::-1]
