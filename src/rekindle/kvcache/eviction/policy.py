"""Chooses which block a tier evicts: one ranking per tenant, and the largest tenant gives way."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Container
from itertools import count
from typing import Protocol

from rekindle.kvcache.eviction.hit_density import HitDensity, HitDensityRanking
from rekindle.protocol.settings import EvictionPolicy


class Ranking(Protocol):
    """Ranks one tenant's blocks in a tier. Only leaves are removed."""

    def __len__(self) -> int: ...
    def __contains__(self, key: object) -> bool: ...

    def add(self, key: bytes, parent: bytes | None) -> None:
        """Rank a new block. Its parent stops being a leaf."""

    def set_parent(self, key: bytes, parent: bytes) -> None:
        """Put a block that was added before its parent under that parent."""

    def use(self, key: bytes) -> None:
        """Record a hit. Ignored if the block has already been evicted."""

    def reuse_probability(self, key: bytes) -> float:
        """Estimated probability that the block is used again; 1 if unknown."""

    def mark_victim(self, key: bytes) -> None:
        """Remember which leaf is about to be evicted, so that `remove` records it as a ghost."""

    def remove(self, key: bytes) -> None:
        """Remove a leaf. When its last child is removed, the parent becomes a leaf."""

    def next_victim(self, excluded: Container[bytes]) -> bytes | None:
        """Return and mark the least valuable leaf that is not in `excluded`. It is not removed."""


class _LruBlock:
    __slots__ = ("children", "parent", "used_tick")

    def __init__(self, parent: bytes | None) -> None:
        self.parent = parent
        self.children = 0
        self.used_tick = 0


class LruRanking:
    """Evicts the least recently used leaf."""

    __slots__ = ("_blocks", "_exposed", "_leaves", "_ticks")

    def __init__(self) -> None:
        self._blocks: dict[bytes, _LruBlock] = {}
        # Both hold leaves, least recently used first. A heap was rejected: it has to pop and push
        # excluded leaves.
        self._leaves: OrderedDict[bytes, None] = OrderedDict()
        #: Blocks that became leaves when their last child was removed, with their `used_tick`.
        self._exposed: list[tuple[int, bytes]] = []
        self._ticks = count()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: object) -> bool:
        return key in self._blocks

    def add(self, key: bytes, parent: bytes | None) -> None:
        self._blocks[key] = _LruBlock(parent)
        if parent is not None:
            self._add_child(parent)
        self.use(key)

    def set_parent(self, key: bytes, parent: bytes) -> None:
        block = self._blocks[key]
        if block.parent is None:
            block.parent = parent
            self._add_child(parent)

    def use(self, key: bytes) -> None:
        if block := self._blocks.get(key):
            if not block.children:
                self._remove_leaf(key, block)
                self._leaves[key] = None
            block.used_tick = next(self._ticks)

    def reuse_probability(self, key: bytes) -> float:
        return 1.0

    def mark_victim(self, key: bytes) -> None:
        """LRU learns nothing from evictions."""

    def remove(self, key: bytes) -> None:
        block = self._blocks.pop(key, None)
        if block is None:
            return
        self._remove_leaf(key, block)
        if block.parent is not None:
            above = self._blocks[block.parent]
            above.children -= 1
            if not above.children:
                insort(self._exposed, (above.used_tick, block.parent))

    def next_victim(self, excluded: Container[bytes]) -> bytes | None:
        leaf = next((key for key in self._leaves if key not in excluded), None)
        exposed = next((key for _, key in self._exposed if key not in excluded), None)
        if leaf is None or exposed is None:
            return leaf if exposed is None else exposed
        return min(leaf, exposed, key=lambda key: self._blocks[key].used_tick)

    def _add_child(self, key: bytes) -> None:
        block = self._blocks[key]
        self._remove_leaf(key, block)
        block.children += 1

    def _remove_leaf(self, key: bytes, block: _LruBlock) -> None:
        """Remove a block from the leaves, if it is one of them."""
        if key in self._leaves:
            del self._leaves[key]
            return
        item = block.used_tick, key
        at = bisect_left(self._exposed, item)
        if self._exposed[at : at + 1] == [item]:
            del self._exposed[at]


class Evictor:
    """Keeps one ranking per tenant. The tenant that holds the most bytes gives way first.

    So each of n tenants keeps an n-th of the budget, whatever the others do. Fixed quotas were
    rejected: they leave memory unused, and a single tenant could never have all of it.
    """

    def __init__(
        self, policy: EvictionPolicy = "hit-density", estimator: HitDensity | None = None
    ) -> None:
        self.estimator = estimator or HitDensity()  # learns from all tenants together
        self._policy = policy
        self._rankings: dict[bytes, Ranking] = {}
        self._held_bytes: dict[bytes, int] = {}
        #: A heap of (-bytes, tenant); outdated items are skipped.
        self._by_size: list[tuple[int, bytes]] = []
        self._resized: set[bytes] = set()  # tenants whose current size is not in the heap

    def held_bytes(self, tenant: bytes) -> int:
        return self._held_bytes.get(tenant, 0)

    def add(self, tenant: bytes, key: bytes, parent: bytes | None, size_bytes: int) -> None:
        ranking = self._rankings.get(tenant)
        if ranking is None:
            ranking = self._rankings[tenant] = new_ranking(self._policy, self.estimator)
        ranking.add(key, parent)
        self.resize(tenant, size_bytes)

    def set_parent(self, tenant: bytes, key: bytes, parent: bytes) -> None:
        """Put a block that was added before its parent under that parent."""
        self._rankings[tenant].set_parent(key, parent)

    def resize(self, tenant: bytes, more_bytes: int) -> None:
        """A block of this tenant has grown by `more_bytes`."""
        self._held_bytes[tenant] = self._held_bytes.get(tenant, 0) + more_bytes
        self._resized.add(tenant)  # pushed at the next eviction: a tenant may add a million blocks

    def use(self, tenant: bytes, key: bytes) -> None:
        if ranking := self._rankings.get(tenant):
            ranking.use(key)

    def reuse_probability(self, tenant: bytes, key: bytes) -> float:
        """Estimated probability that the block is used again; 1 if unknown."""
        ranking = self._rankings.get(tenant)
        return ranking.reuse_probability(key) if ranking is not None and key in ranking else 1.0

    def remove(self, tenant: bytes, key: bytes, size_bytes: int) -> None:
        """Remove a leaf. A tenant without blocks is forgotten."""
        if key not in self._rankings.get(tenant, ()):
            return
        self._rankings[tenant].remove(key)
        if self._rankings[tenant]:
            self.resize(tenant, -size_bytes)
        else:
            del self._rankings[tenant], self._held_bytes[tenant]
            self._resized.discard(tenant)

    def evict(self, tenant: bytes, key: bytes, size_bytes: int) -> None:
        """Remove a leaf that may come back, though it was not chosen by `next_victim`."""
        if ranking := self._rankings.get(tenant):
            ranking.mark_victim(key)
        self.remove(tenant, key, size_bytes)

    def next_victim(self, excluded: Container[bytes]) -> bytes | None:
        """Return the block to evict next, or None if all are excluded. It is not removed."""
        self._push_resized()
        visited: dict[bytes, int] = {}
        victim = None
        while victim is None and self._by_size:
            less_bytes, tenant = heapq.heappop(self._by_size)
            if self._held_bytes.get(tenant) != -less_bytes or tenant in visited:
                continue
            visited[tenant] = less_bytes
            victim = self._rankings[tenant].next_victim(excluded)
        for tenant, less_bytes in visited.items():
            heapq.heappush(self._by_size, (less_bytes, tenant))
        return victim

    def _push_resized(self) -> None:
        for tenant in self._resized:
            if (held_bytes := self._held_bytes.get(tenant)) is not None:
                heapq.heappush(self._by_size, (-held_bytes, tenant))
        self._resized.clear()
        if len(self._by_size) > 64 + 2 * len(self._held_bytes):
            self._by_size = [(-held, each) for each, held in self._held_bytes.items()]
            heapq.heapify(self._by_size)


def new_ranking(policy: EvictionPolicy, estimator: HitDensity) -> Ranking:
    return LruRanking() if policy == "lru" else HitDensityRanking(estimator)
