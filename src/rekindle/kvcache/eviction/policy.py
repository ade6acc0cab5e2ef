"""Chooses which block a tier evicts: one ranking per tenant, and the largest tenant gives way."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Container
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

from rekindle.kvcache.eviction.hit_density import SPAN_TICKS, HitDensity
from rekindle.protocol.settings import EvictionPolicy

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class RankedBlock:
    parent: bytes | None
    used_tick: int = 0
    class_: int = 0  # of an estimator
    children: int = 0

    @property
    def slot(self) -> int:
        """Sort key: by class, then by the span of the last use."""
        return (self.class_ << 40) + self.used_tick // SPAN_TICKS


class Ranking(ABC):
    """Ranks one tenant's blocks in a tier. Only leaves are removed."""

    __slots__ = ("_blocks", "_victim")

    def __init__(self) -> None:
        self._blocks: dict[bytes, RankedBlock] = {}
        self._victim: bytes | None = None  # for rankings that learn from evictions

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: object) -> bool:
        return key in self._blocks

    @abstractmethod
    def add(self, key: bytes, parent: bytes | None) -> None:
        """Rank a new block. Its parent stops being a leaf."""

    def set_parent(self, key: bytes, parent: bytes) -> None:
        """Put a block that was added before its parent under that parent."""
        block = self._blocks[key]
        if block.parent is None:
            block.parent = parent
            self._extend(parent)

    def _extend(self, key: bytes) -> None:
        """Count one more child of a block."""
        block = self._blocks[key]
        if not block.children:
            self._remove_leaf(key, block)
        block.children += 1

    @abstractmethod
    def use(self, key: bytes) -> None:
        """Record a hit. Ignored if the block has already been evicted."""

    def reuse_probability(self, key: bytes) -> float:
        """Estimated probability that the block is used again; 1 if unknown."""
        return 1.0

    def mark_victim(self, key: bytes) -> None:
        """Remember which leaf is about to be evicted, so that `remove` can record it as a ghost."""
        self._victim = key

    def remove(self, key: bytes) -> None:
        """Remove a leaf. When its last child is removed, the parent becomes a leaf."""
        block = self._blocks.pop(key)
        self._remove_leaf(key, block)
        if block.parent is not None:
            above = self._blocks[block.parent]
            above.children -= 1
            if not above.children:
                self._expose_leaf(block.parent, above)

    @abstractmethod
    def next_victim(self, excluded: Container[bytes]) -> bytes | None:
        """Return and mark the least valuable leaf that is not in `excluded`. It is not removed."""

    @abstractmethod
    def _expose_leaf(self, key: bytes, block: RankedBlock) -> None:
        """Add a block, whose last child was removed, to the leaves."""

    @abstractmethod
    def _remove_leaf(self, key: bytes, block: RankedBlock) -> None:
        """Remove a block from the leaves."""


class LruRanking(Ranking):
    """Evicts the least recently used leaf."""

    __slots__ = ("_exposed", "_leaves", "_ticks")

    def __init__(self) -> None:
        super().__init__()
        # Both hold leaves, least recently used first. A heap was rejected: it has to pop and push
        # excluded leaves.
        self._leaves: OrderedDict[bytes, None] = OrderedDict()
        #: Blocks that became leaves when their last child was removed, with their `used_tick`.
        self._exposed: list[tuple[int, bytes]] = []
        self._ticks = count()

    def add(self, key: bytes, parent: bytes | None) -> None:
        self._blocks[key] = RankedBlock(parent, next(self._ticks))
        self._leaves[key] = None
        if parent is not None:
            self._extend(parent)

    def use(self, key: bytes) -> None:
        if block := self._blocks.get(key):
            if not block.children:
                self._remove_leaf(key, block)
                self._leaves[key] = None
            block.used_tick = next(self._ticks)

    def next_victim(self, excluded: Container[bytes]) -> bytes | None:
        leaf = next((key for key in self._leaves if key not in excluded), None)
        exposed = next((key for _, key in self._exposed if key not in excluded), None)
        if leaf is None or exposed is None:
            return leaf if exposed is None else exposed
        return min(leaf, exposed, key=lambda key: self._blocks[key].used_tick)

    def _expose_leaf(self, key: bytes, block: RankedBlock) -> None:
        insort(self._exposed, (block.used_tick, key))

    def _remove_leaf(self, key: bytes, block: RankedBlock) -> None:
        if key in self._leaves:
            del self._leaves[key]
        else:
            del self._exposed[bisect_left(self._exposed, (block.used_tick, key))]


class HitDensityRanking(Ranking):
    """Evicts the leaf with the lowest density. Among equal ones, the least recently used leaf is
    evicted.

    Leaves are grouped by class and by the span of their last use. So no leaf moves as it ages, and
    an eviction costs the number of classes and ages, not the number of blocks. Rejected: sampling
    leaves (random and slower), heaps, one list per age.
    """

    __slots__ = ("_estimator", "_leaves", "_slots")

    def __init__(self, estimator: HitDensity) -> None:
        super().__init__()
        self._estimator = estimator
        self._leaves: dict[int, list[bytes]] = {}  # by slot; no list is empty
        self._slots: list[int] = []  # the keys of `_leaves`, sorted

    def add(self, key: bytes, parent: bytes | None) -> None:
        class_ = self._estimator.add(key)
        self._blocks[key] = block = RankedBlock(parent, self._estimator.tick, class_)
        if parent is not None:
            self._extend(parent)
        self._expose_leaf(key, block)

    def _extend(self, key: bytes) -> None:
        super()._extend(key)
        block = self._blocks[key]
        block.class_ = self._estimator.extend(block.class_, block.used_tick)

    def use(self, key: bytes) -> None:
        if block := self._blocks.get(key):
            if not block.children:
                self._remove_leaf(key, block)
            block.class_ = self._estimator.use(block.class_, block.used_tick)
            block.used_tick = self._estimator.tick
            if not block.children:
                self._expose_leaf(key, block)

    def reuse_probability(self, key: bytes) -> float:
        block = self._blocks[key]
        return self._estimator.reuse_probability(block.class_, block.used_tick)

    def remove(self, key: bytes) -> None:
        block = self._blocks[key]
        # Only an evicted block may come back. A tail that a longer block covers never does.
        ghost_key = key if key == self._victim else None
        self._estimator.remove(ghost_key, block.class_, block.used_tick)
        super().remove(key)

    def next_victim(self, excluded: Container[bytes]) -> bytes | None:
        self._victim = self._lowest_leaf(excluded)
        return self._victim

    def _lowest_leaf(self, excluded: Container[bytes]) -> bytes | None:
        slots, starts = self._slots, self._estimator.age_starts()
        for class_, age in self._estimator.order:
            begin = class_ << 40
            end = begin + starts[age]
            at = bisect_left(slots, begin + max(starts[age + 1], 0))
            while at < len(slots) and slots[at] < end:
                for key in self._leaves[slots[at]]:
                    if key not in excluded:
                        return key
                at += 1
        return None

    def _expose_leaf(self, key: bytes, block: RankedBlock) -> None:
        slot = block.slot
        if leaves := self._leaves.get(slot):
            leaves.append(key)
        else:
            self._leaves[slot] = [key]
            insort(self._slots, slot)

    def _remove_leaf(self, key: bytes, block: RankedBlock) -> None:
        slot = block.slot
        leaves = self._leaves[slot]
        leaves.remove(key)  # at most SPAN_TICKS keys
        if not leaves:
            del self._leaves[slot]
            del self._slots[bisect_left(self._slots, slot)]


class TenantSizes:
    """Bytes by tenant, and the tenants in the order of their size."""

    def __init__(self) -> None:
        self._sizes: dict[bytes, int] = {}
        #: A heap of (-bytes, tenant); outdated items are skipped.
        self._by_size: list[tuple[int, bytes]] = []
        self._resized: set[bytes] = set()  # tenants whose current size is not in the heap

    def get(self, tenant: bytes) -> int:
        return self._sizes.get(tenant, 0)

    def set(self, tenant: bytes, size_bytes: int) -> None:
        self._sizes[tenant] = size_bytes
        self._resized.add(tenant)  # pushed by `first`: a tenant may change a million times before

    def forget(self, tenant: bytes) -> None:
        self._sizes.pop(tenant, None)
        self._resized.discard(tenant)

    def first(self, choose: Callable[[bytes], T | None]) -> T | None:
        """Call `choose` with the largest tenant, then with the next, until it returns something."""
        self._push_resized()
        visited: dict[bytes, int] = {}
        chosen = None
        while chosen is None and self._by_size:
            less_bytes, tenant = heapq.heappop(self._by_size)
            if self._sizes.get(tenant) != -less_bytes or tenant in visited:
                continue
            visited[tenant] = less_bytes
            chosen = choose(tenant)
        for tenant, less_bytes in visited.items():
            heapq.heappush(self._by_size, (less_bytes, tenant))
        return chosen

    def _push_resized(self) -> None:
        for tenant in self._resized:
            heapq.heappush(self._by_size, (-self._sizes[tenant], tenant))
        self._resized.clear()
        if len(self._by_size) > 64 + 2 * len(self._sizes):
            self._by_size = [(-size, each) for each, size in self._sizes.items()]
            heapq.heapify(self._by_size)


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
        self._sizes = TenantSizes()

    def held_bytes(self, tenant: bytes) -> int:
        return self._sizes.get(tenant)

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
        self._sizes.set(tenant, self._sizes.get(tenant) + more_bytes)

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
            del self._rankings[tenant]
            self._sizes.forget(tenant)

    def evict(self, tenant: bytes, key: bytes, size_bytes: int) -> None:
        """Remove a leaf that may come back, though it was not chosen by `next_victim`."""
        if ranking := self._rankings.get(tenant):
            ranking.mark_victim(key)
        self.remove(tenant, key, size_bytes)

    def next_victim(self, excluded: Container[bytes]) -> bytes | None:
        """Return the block to evict next, or None if all are excluded. It is not removed."""
        return self._sizes.first(lambda tenant: self._rankings[tenant].next_victim(excluded))


def new_ranking(policy: EvictionPolicy, estimator: HitDensity) -> Ranking:
    return LruRanking() if policy == "lru" else HitDensityRanking(estimator)
