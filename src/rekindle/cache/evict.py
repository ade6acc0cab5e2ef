"""Which block is worth least: least often used, with old use counting less and less."""

from __future__ import annotations

import heapq
from itertools import count

Rank = tuple[int, int]  # worth, then the tick of the last use


class Ranking:
    """Least frequently used with dynamic ageing: a use lifts a key one above its worth or above
    the floor, and the floor rises to the worth of whatever was evicted last, so old fame fades.
    Plain LRU was rejected: one long scan would throw out the system prompt everybody shares.

    A parent never ranks below its child, so the lowest key is always a leaf.
    """

    def __init__(self) -> None:
        self._ranks: dict[bytes, Rank] = {}
        self._heap: list[tuple[Rank, bytes]] = []
        self._floor = 0
        self._ticks = count()

    def use(self, chain: list[bytes]) -> None:
        """Count one use of every key; the chain runs from the oldest ancestor to the leaf."""
        for key in reversed(chain):  # the leaf first: on a tie the parent is the younger
            self._set(key, max(self._worth(key), self._floor) + 1)

    def enter(self, key: bytes, ancestors: list[bytes]) -> None:
        """Rank a new key, and lift its ancestors (oldest first) to at least its worth."""
        worth = self._floor + 1
        self._set(key, worth)
        for ancestor in reversed(ancestors):
            self._set(ancestor, max(self._worth(ancestor), worth))

    def leave(self, key: bytes) -> None:
        self._ranks.pop(key, None)  # its heap entries die when they surface

    def evict(self, spared: set[bytes]) -> bytes | None:
        """Take the lowest key off the ranking; those spared stay."""
        aside = []
        victim = None
        while victim is None and self._heap:
            entry = heapq.heappop(self._heap)
            rank, key = entry
            if self._ranks.get(key) != rank:
                continue
            if key in spared:
                aside.append(entry)
                continue
            self._floor = max(self._floor, rank[0])
            del self._ranks[key]
            victim = key
        for entry in aside:
            heapq.heappush(self._heap, entry)
        return victim

    def _worth(self, key: bytes) -> int:
        return self._ranks.get(key, (0, 0))[0]

    def _set(self, key: bytes, worth: int) -> None:
        self._ranks[key] = (worth, next(self._ticks))
        heapq.heappush(self._heap, (self._ranks[key], key))
        if len(self._heap) > 64 + 4 * len(self._ranks):
            self._heap = [(rank, key) for key, rank in self._ranks.items()]
            heapq.heapify(self._heap)
