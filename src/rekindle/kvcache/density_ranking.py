"""A ranking of one tenant's blocks by what the tier has learnt of blocks like them."""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterable

from rekindle.kvcache.hit_density import History, HitDensity, age_bin

SORT_TICKS = 64  # between two times that what has aged is sorted in anew
MOST_MOVES = 1024  # each time: after a million blocks were taken in, nobody waits for all of them

Bucket = tuple[int, int]  # class and age


class _Place:
    """Where a key stands in the tree, and what is known of it."""

    __slots__ = ("children", "history", "parent")

    def __init__(self, parent: bytes | None, history: History) -> None:
        self.parent = parent
        self.children = 0
        self.history = history


class DensityRanking:
    """The leaf of the least expected hits for its time goes first; of those alike the one that was
    used longest ago. Leaves lie in buckets by class and age, so an eviction looks at buckets,
    however many blocks there are. (Sampling leaves was rejected: it needs chance, and is slower.)
    """

    __slots__ = ("_buckets", "_learnt", "_offered", "_places", "_sorted_tick")

    def __init__(self, learnt: HitDensity) -> None:
        self._learnt = learnt
        self._places: dict[bytes, _Place] = {}
        #: Each a heap by the last use; what is out of date dies on top. None is empty.
        self._buckets: dict[Bucket, list[tuple[int, bytes]]] = {}
        self._offered = 0  # in all buckets
        self._sorted_tick = 0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def enter(self, key: bytes, parent: bytes | None) -> None:
        """Rank a new key; its parent is no leaf from now on."""
        place = self._places[key] = _Place(parent, self._learnt.enter(key))
        if parent is not None:
            self._extend(self._places[parent])
        self._offer(key, place)

    def adopt(self, key: bytes, child: bytes) -> None:
        """A child that was here before its parent is under it from now on."""
        place = self._places[child]
        if place.parent is None:
            place.parent = key
            self._extend(self._places[key])

    def use(self, keys: Iterable[bytes]) -> None:
        """Count one use of every key; those that have left are ignored."""
        for key in keys:
            if place := self._places.get(key):
                place.history = self._learnt.use(place.history)
                self._offer(key, place)

    def leave(self, key: bytes) -> None:
        """Take a leaf off the ranking; the last child makes its parent a leaf."""
        place = self._places.pop(key, None)
        if place is None:
            return
        self._learnt.leave(key, place.history)
        if place.parent is not None:
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
        """The leaf to go next, those spared left out."""
        if self._learnt.tick - self._sorted_tick >= SORT_TICKS:
            self._sort_aged()
        # What is out of date goes first, or asking twice would give two answers.
        buckets = [bucket for bucket in list(self._buckets) if self._top(bucket)]
        for bucket in sorted(buckets, key=self._worth):
            victim = self._lowest_in(bucket, spared)
            if victim is not None:
                return victim
        return None

    # -- buckets -------------------------------------------------------------------------------

    def _worth(self, bucket: Bucket) -> tuple[float, int]:
        """Of a bucket; of equals the one that was used longest ago goes first."""
        class_, age = bucket
        return self._learnt.worths[class_][age], self._buckets[bucket][0][0]

    def _lowest_in(self, bucket: Bucket, spared: Container[bytes]) -> bytes | None:
        passed_over: list[tuple[int, bytes]] = []
        victim = None
        while victim is None and (entry := self._top(bucket)) is not None:
            passed_over.append(entry)
            self._pop(bucket)
            if entry[1] not in spared:
                victim = entry[1]
        for entry in passed_over:
            self._push(bucket, entry)
        return victim

    def _sort_aged(self) -> None:
        """Move what has outgrown its bucket to the next ones; each block does so a few times."""
        self._sorted_tick = self._learnt.tick
        moves = 0
        for bucket in list(self._buckets):
            while moves < MOST_MOVES and (entry := self._top(bucket)) is not None:
                age = age_bin(self._learnt.tick - entry[0])
                if age == bucket[1]:
                    break
                self._pop(bucket)
                self._push((bucket[0], age), entry)
                moves += 1

    def _top(self, bucket: Bucket) -> tuple[int, bytes] | None:
        """What is up to date on top of a bucket."""
        while entries := self._buckets.get(bucket):
            tick, key = entries[0]
            place = self._places.get(key)
            if place is not None and not place.children:
                history = place.history
                if history.used_tick == tick and history.class_ == bucket[0]:
                    return entries[0]
            self._pop(bucket)
        return None

    def _push(self, bucket: Bucket, entry: tuple[int, bytes]) -> None:
        heapq.heappush(self._buckets.setdefault(bucket, []), entry)
        self._offered += 1

    def _pop(self, bucket: Bucket) -> None:
        entries = self._buckets[bucket]
        heapq.heappop(entries)
        self._offered -= 1
        if not entries:
            del self._buckets[bucket]

    def _extend(self, place: _Place) -> None:
        """One more block follows; when it is a leaf again it is offered anew."""
        place.children += 1
        place.history = place.history._replace(extensions=place.history.extensions + 1)

    def _offer(self, key: bytes, place: _Place) -> None:
        if place.children:
            return
        history = place.history
        age = age_bin(self._learnt.tick - history.used_tick)
        self._push((history.class_, age), (history.used_tick, key))
        if self._offered > 64 + 2 * len(self._places):
            self._buckets.clear()
            self._offered = 0
            for each, other in self._places.items():
                if not other.children:
                    self._offer(each, other)
