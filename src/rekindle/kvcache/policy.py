"""Which block is worth least: least often used, with old use counting less and less."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Iterable
from functools import partial
from itertools import count

from rekindle.kvcache.density_ranking import DensityRanking
from rekindle.kvcache.hit_density import HitDensity
from rekindle.protocol.settings import EvictionPolicy

Rank = tuple[int, int]  # worth, then the tick of the last use


class _Place:
    """Where a key stands in the ranking and in the tree."""

    __slots__ = ("children", "parent", "rank")

    def __init__(self, parent: bytes | None) -> None:
        self.parent = parent
        self.children = 0
        self.rank: Rank = (0, 0)


class Ranking:
    """Least frequently used with dynamic ageing: a use lifts a key one above its worth or above
    the floor, and the floor rises to the worth of whatever was evicted last, so old use
    counts less and less. Plain LRU was rejected: one long scan would throw out the system prompt
    everybody shares.

    Only leaves are evicted; a parent, whatever its rank, stays as long as it has a child. (Lifting
    every ancestor above its children was rejected: each new block cost its whole chain.)
    """

    __slots__ = ("_floor", "_leaves", "_places", "_ticks")

    def __init__(self) -> None:
        self._places: dict[bytes, _Place] = {}
        self._leaves: list[tuple[Rank, bytes]] = []  # a heap; what is out of date dies on top
        self._floor = 0
        self._ticks = count()

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def enter(self, key: bytes, parent: bytes | None) -> None:
        """Rank a new key; its parent is no leaf from now on."""
        place = self._places[key] = _Place(parent)
        if parent is not None:
            self._places[parent].children += 1
        self._lift(key, place, self._floor + 1)

    def adopt(self, key: bytes, child: bytes) -> None:
        """A child that was here before its parent is under it from now on."""
        place = self._places[child]
        if place.parent is None:
            place.parent = key
            self._places[key].children += 1

    def use(self, keys: Iterable[bytes]) -> None:
        """Count one use of every key; those that have left are ignored."""
        for key in keys:
            if place := self._places.get(key):
                self._lift(key, place, max(place.rank[0], self._floor) + 1)

    def leave(self, key: bytes) -> None:
        """Take a leaf off the ranking; the last child makes its parent a leaf."""
        place = self._places.pop(key, None)
        if place is not None and place.parent is not None:
            above = self._places[place.parent]
            above.children -= 1
            self._offer(place.parent, above)

    def evict(self, spared: Container[bytes]) -> bytes | None:
        """Take the lowest leaf off the ranking; those spared stay."""
        victim = self.lowest(spared)
        if victim is not None:
            self.leave(victim)
        return victim

    def lowest(self, spared: Container[bytes]) -> bytes | None:
        """The leaf to go next, those spared left out; the floor rises to its worth."""
        passed_over = []
        victim = None
        while victim is None and self._leaves:
            rank, key = heapq.heappop(self._leaves)
            place = self._places.get(key)
            if place is None or place.children or place.rank != rank:
                continue
            passed_over.append((rank, key))
            if key not in spared:
                self._floor = max(self._floor, rank[0])
                victim = key
        for entry in passed_over:
            heapq.heappush(self._leaves, entry)
        return victim

    def _lift(self, key: bytes, place: _Place, worth: int) -> None:
        place.rank = (worth, next(self._ticks))
        self._offer(key, place)

    def _offer(self, key: bytes, place: _Place) -> None:
        if place.children:
            return
        heapq.heappush(self._leaves, (place.rank, key))
        if len(self._leaves) > 64 + 2 * len(self._places):
            self._leaves = [(p.rank, k) for k, p in self._places.items() if not p.children]
            heapq.heapify(self._leaves)


#: What a tier's tenants are each ranked by, given what the tier learns.
POLICIES: dict[EvictionPolicy, Callable[[HitDensity], Callable[[], Ranking | DensityRanking]]] = {
    "hit-density": lambda learnt: partial(DensityRanking, learnt),
    "frequency": lambda _: Ranking,
}


class Shares:
    """One ranking for each tenant; room is made by the tenant that holds most. So whatever one of
    n tenants does, the others keep an n-th of the budget. (Fixed quotas were rejected: they leave
    room unused, and one tenant alone could never have it all.)
    """

    def __init__(self, policy: EvictionPolicy = "frequency") -> None:
        self.learnt = HitDensity()  # by all tenants together: of blocks, not of what is in them
        self._new_ranking = POLICIES[policy](self.learnt)
        self._rankings: dict[bytes, Ranking | DensityRanking] = {}
        self._held_bytes: dict[bytes, int] = {}
        #: A heap, those that hold most first; what is out of date dies on top.
        self._by_size: list[tuple[int, bytes]] = []
        self._resized: set[bytes] = set()  # tenants whose size the heap does not have yet

    def held_bytes(self, namespace: bytes) -> int:
        return self._held_bytes.get(namespace, 0)

    def enter(self, namespace: bytes, key: bytes, parent: bytes | None, size_bytes: int) -> None:
        ranking = self._rankings.get(namespace)
        if ranking is None:
            ranking = self._rankings[namespace] = self._new_ranking()
        ranking.enter(key, parent)
        self.resize(namespace, size_bytes)

    def adopt(self, namespace: bytes, key: bytes, child: bytes) -> None:
        """A child that came first is its parent's now."""
        self._rankings[namespace].adopt(key, child)

    def resize(self, namespace: bytes, more_bytes: int) -> None:
        """A key of this tenant takes so much more."""
        self._held_bytes[namespace] = self._held_bytes.get(namespace, 0) + more_bytes
        self._resized.add(namespace)  # sorted in when room is made: a tenant may enter a million

    def use(self, namespace: bytes, key: bytes) -> None:
        if ranking := self._rankings.get(namespace):
            ranking.use((key,))

    def leave(self, namespace: bytes, key: bytes, size_bytes: int) -> None:
        """Take a leaf off; a tenant that holds nothing is forgotten."""
        if key not in self._rankings.get(namespace, ()):
            return
        self._rankings[namespace].leave(key)
        if self._rankings[namespace]:
            self.resize(namespace, -size_bytes)
        else:
            del self._rankings[namespace], self._held_bytes[namespace]
            self._resized.discard(namespace)

    def lowest(self, spared: Container[bytes]) -> bytes | None:
        """The key that makes room next. It stays until it leaves."""
        self._sort_in()
        passed_over: dict[bytes, int] = {}
        victim = None
        while victim is None and self._by_size:
            less_bytes, namespace = heapq.heappop(self._by_size)
            if self._held_bytes.get(namespace) != -less_bytes or namespace in passed_over:
                continue
            passed_over[namespace] = less_bytes
            victim = self._rankings[namespace].lowest(spared)
        for namespace, less_bytes in passed_over.items():
            heapq.heappush(self._by_size, (less_bytes, namespace))
        return victim

    def _sort_in(self) -> None:
        """Give the tenants that hold more or less than before their places."""
        for namespace in self._resized:
            if (held_bytes := self._held_bytes.get(namespace)) is not None:
                heapq.heappush(self._by_size, (-held_bytes, namespace))
        self._resized.clear()
        if len(self._by_size) > 64 + 2 * len(self._held_bytes):
            self._by_size = [(-held, each) for each, held in self._held_bytes.items()]
            heapq.heapify(self._by_size)
