"""A ranking of one tenant's blocks by what the tier has learnt of blocks like them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Container, Iterable

from rekindle.kvcache.eviction.hit_density import SPAN_TICKS, HitDensity

GROUPS = 256
COMMON = 4  # blocks after one: it belongs to no single conversation
MOST_SPANS = 1 << 40  # of a class


class _Place:
    """Where a key stands in the tree, and what is known of it."""

    __slots__ = ("children", "class_", "extensions", "group", "parent", "used_tick")

    def __init__(self, parent: bytes | None, class_: int, used_tick: int) -> None:
        self.parent = parent
        self.children = 0
        self.extensions = 0  # how many blocks were ever put after it
        self.group = 0
        self.class_ = class_
        self.used_tick = used_tick


class DensityRanking:
    """The leaf of the least expected hits for its time goes first; of those alike the one that was
    used longest ago.

    Leaves lie by their class and the span of time they were last used in, so none is moved as it
    ages, and an eviction looks at classes and ages, however many blocks there are. (Sampling leaves
    was rejected: it needs chance, and is slower. So were heaps, and lists for each age.)
    """

    __slots__ = ("_learnt", "_leaves", "_places", "_slots", "victim")

    def __init__(self, learnt: HitDensity) -> None:
        self._learnt = learnt
        self._places: dict[bytes, _Place] = {}
        self._leaves: dict[int, list[bytes]] = {}  # by slot: class and span; none is empty
        self._slots: list[int] = []  # the same, sorted
        self.victim: bytes | None = None  # who was said to go next

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: object) -> bool:
        return key in self._places

    @property
    def keys(self) -> Iterable[bytes]:
        return self._places.keys()

    def enter(self, key: bytes, parent: bytes | None) -> None:
        """Rank a new key; its parent is no leaf from now on."""
        place = _Place(parent, self._learnt.enter(key), self._learnt.tick)
        place.group = key[0]
        if parent is not None and self._places[parent].extensions < COMMON:
            place.group = self._places[parent].group
        self._places[key] = place
        if parent is not None:
            self._extend(parent)
        self._offer(key, place)

    def adopt(self, key: bytes, child: bytes) -> None:
        """A child that was here before its parent is under it from now on."""
        place = self._places[child]
        if place.parent is None:
            place.parent = key
            self._extend(key)

    def is_leaf(self, key: bytes) -> bool:
        place = self._places.get(key)
        return place is not None and not place.children

    def parent(self, key: bytes) -> bytes | None:
        return self._places[key].parent

    def group(self, key: bytes) -> int | None:
        """A number below GROUPS that the blocks of a conversation have in common; None: many
        conversations begin with this block."""
        place = self._places[key]
        return None if place.extensions >= COMMON else place.group

    def chance(self, key: bytes) -> float:
        """That a key is used again."""
        place = self._places[key]
        return self._learnt.chance(place.class_, place.used_tick)

    def use(self, key: bytes) -> None:
        """Count one use; of a key that has left it is ignored."""
        if place := self._places.get(key):
            self._withdraw(key, place)
            place.class_ = self._learnt.use(place.class_, place.used_tick)
            place.used_tick = self._learnt.tick
            self._offer(key, place)

    def expect(self, key: bytes | None) -> None:
        """This leaf leaves next, and may come back."""
        self.victim = key

    def leave(self, key: bytes) -> None:
        """Take a leaf off the ranking; the last child makes its parent a leaf."""
        place = self._places.pop(key, None)
        if place is None:
            return
        self._withdraw(key, place)
        # Only what was evicted may come back: a tail that a longer block covers is of no use.
        self._learnt.leave(key if key == self.victim else None, place.class_, place.used_tick)
        if place.parent is not None:
            above = self._places[place.parent]
            above.children -= 1
            self._offer(place.parent, above)

    def lowest(self, spared: Container[bytes]) -> bytes | None:
        """The leaf to go next, those spared left out."""
        self.victim = self._find_lowest(spared)
        return self.victim

    def _find_lowest(self, spared: Container[bytes]) -> bytes | None:
        slots, starts = self._slots, self._learnt.age_starts()
        for class_, age in self._learnt.order:
            begin = class_ * MOST_SPANS
            end = begin + starts[age]
            at = bisect_left(slots, begin + max(starts[age + 1], 0))
            while at < len(slots) and slots[at] < end:
                for key in self._leaves[slots[at]]:
                    if key not in spared:
                        return key
                at += 1
        return None

    # -- leaves --------------------------------------------------------------------------------

    def _extend(self, key: bytes) -> None:
        """One more block follows."""
        place = self._places[key]
        self._withdraw(key, place)
        place.children += 1
        place.extensions += 1
        place.class_ = self._learnt.extend(place.class_, place.used_tick)

    def _offer(self, key: bytes, place: _Place) -> None:
        """Put a leaf where it belongs."""
        if place.children:
            return
        slot = _slot(place)
        if leaves := self._leaves.get(slot):
            leaves.append(key)
        else:
            self._leaves[slot] = [key]
            insort(self._slots, slot)

    def _withdraw(self, key: bytes, place: _Place) -> None:
        if place.children:
            return
        slot = _slot(place)
        leaves = self._leaves[slot]
        leaves.remove(key)  # of as many as a span has ticks, at most
        if not leaves:
            del self._leaves[slot]
            del self._slots[bisect_left(self._slots, slot)]


def _slot(place: _Place) -> int:
    return place.class_ * MOST_SPANS + place.used_tick // SPAN_TICKS
