"""Which block makes room: how each tenant's are ranked, and whose turn it is."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container
from functools import partial
from typing import Protocol

from rekindle.kvcache.eviction.adaptive_ranking import AdaptiveRanking
from rekindle.kvcache.eviction.density_ranking import DensityRanking
from rekindle.kvcache.eviction.duel import Duel
from rekindle.kvcache.eviction.frequency_ranking import FrequencyRanking
from rekindle.protocol.settings import EvictionPolicy


class Ranking(Protocol):
    """One tenant's blocks in a tier. Only leaves leave."""

    def __len__(self) -> int: ...
    def __contains__(self, key: object) -> bool: ...

    def enter(self, key: bytes, parent: bytes | None) -> None:
        """Rank a new key; its parent is no leaf from now on."""

    def adopt(self, key: bytes, child: bytes) -> None:
        """A child that was here before its parent is under it from now on."""

    def use(self, key: bytes) -> None:
        """Count one use; of a key that has left it is ignored."""

    def chance(self, key: bytes) -> float:
        """That a key that is here is used again, as far as is known."""

    def expect(self, key: bytes) -> None:
        """This leaf leaves next, and may come back; so whatever `lowest` says does."""

    def leave(self, key: bytes) -> None:
        """Take a leaf off the ranking; the last child makes its parent a leaf."""

    def lowest(self, spared: Container[bytes]) -> bytes | None:
        """The leaf to go next, those spared left out. It stays until it leaves."""


#: What a tier's tenants are each ranked by, given what the tier learns.
POLICIES: dict[EvictionPolicy, Callable[[Duel], Callable[[], Ranking]]] = {
    "adaptive": lambda duel: partial(AdaptiveRanking, duel),
    "hit-density": lambda duel: partial(DensityRanking, duel.learnt),
    "frequency": lambda _: FrequencyRanking,
}


class Shares:
    """One ranking for each tenant; room is made by the tenant that holds most. So whatever one of
    n tenants does, the others keep an n-th of the budget. (Fixed quotas were rejected: they leave
    room unused, and one tenant alone could never have it all.)
    """

    def __init__(self, policy: EvictionPolicy = "adaptive", duel: Duel | None = None) -> None:
        self.duel = duel or Duel()  # learns from all tenants together, nothing of what is in blocks
        self._new_ranking = POLICIES[policy](self.duel)
        self._rankings: dict[bytes, Ranking] = {}
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
            ranking.use(key)

    def chance(self, namespace: bytes, key: bytes) -> float:
        """That a key is used again, as far as is known."""
        ranking = self._rankings.get(namespace)
        return ranking.chance(key) if ranking is not None and key in ranking else 1.0

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

    def evict(self, namespace: bytes, key: bytes, size_bytes: int) -> None:
        """Take a leaf off that may come back, though it was not the lowest."""
        if ranking := self._rankings.get(namespace):
            ranking.expect(key)
        self.leave(namespace, key, size_bytes)

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
