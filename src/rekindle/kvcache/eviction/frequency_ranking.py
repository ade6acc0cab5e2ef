"""Which block is worth least: least often used, with old use counting less and less."""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterable
from itertools import count

Rank = tuple[int, int]  # worth, then the tick of the last use


class _Place:
    """Where a key stands in the ranking and in the tree."""

    __slots__ = ("children", "parent", "rank")

    def __init__(self, parent: bytes | None) -> None:
        self.parent = parent
        self.children = 0
        self.rank: Rank = (0, 0)


class FrequencyRanking:
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

    @property
    def keys(self) -> Iterable[bytes]:
        return self._places.keys()

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

    def is_leaf(self, key: bytes) -> bool:
        place = self._places.get(key)
        return place is not None and not place.children

    def chance(self, key: bytes) -> float:
        """That a key is used again: nothing is learnt here, so it may well be."""
        return 1.0

    def use(self, key: bytes) -> None:
        """Count one use; of a key that has left it is ignored."""
        if place := self._places.get(key):
            self._lift(key, place, max(place.rank[0], self._floor) + 1)

    def expect(self, key: bytes) -> None:
        """Nothing is remembered of what leaves."""

    def leave(self, key: bytes) -> None:
        """Take a leaf off the ranking; the last child makes its parent a leaf."""
        place = self._places.pop(key, None)
        if place is not None and place.parent is not None:
            above = self._places[place.parent]
            above.children -= 1
            self._offer(place.parent, above)

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
