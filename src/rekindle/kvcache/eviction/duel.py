"""Two caches without state that show which rule of eviction has more hits in a tier."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from rekindle.kvcache.eviction.density_ranking import GROUPS, DensityRanking
from rekindle.kvcache.eviction.frequency_ranking import FrequencyRanking
from rekindle.kvcache.eviction.hit_density import HitDensity

Rule = Literal["frequency", "hit-density"]

MOST_BLOCKS = 16384  # in each of the two; of a larger tier conversations are left out
SCORE_TICKS = 256  # blocks seen, until what was seen before counts less
SCORE_FADE = 0.98
#: More hits than the favourite has had, to take its place.
MARGIN = 1.02
LEAST_MARGIN_HITS = 128  # a long conversation is hit as a whole, by chance


class Duel:
    """Each cache sees the same share of the tier's conversations and is as large a share of it.
    Nothing is seen before the tier makes room for the first time: until then all rules are alike.
    """

    def __init__(self) -> None:
        self.learnt = HitDensity()  # of the tier itself
        self.favourite: Rule = "hit-density"
        self._caches: dict[Rule, _Cache] = {}
        self._groups = GROUPS  # of which blocks are seen
        self._seen = 0

    @property
    def is_on(self) -> bool:
        return bool(self._caches)

    def seen_keys(self) -> set[bytes]:
        """What one of the caches holds, or both do."""
        return {key for cache in self._caches.values() for key in cache.keys}

    def dump(self) -> dict[str, object]:
        """What the tier has learnt, to be loaded by another process."""
        return {"counts": self.learnt.dump(), "favourite": self.favourite}

    def load(self, learnt: object) -> None:
        """Go on from what `dump` gave; raises ValueError if that is not what it is."""
        match learnt:
            case {"counts": counts, "favourite": "frequency" | "hit-density" as favourite}:
                self.learnt.load(counts)
                self.favourite = favourite
            case _:
                raise ValueError("a tier has learnt counts and a favourite")

    def begin(self) -> None:
        """The tier is full."""
        if not self._caches:
            self._caches["frequency"] = _Cache(FrequencyRanking())
            learnt = HitDensity()
            learnt.load(self.learnt.dump())
            self._caches["hit-density"] = _Cache(DensityRanking(learnt))

    def see(self, key: bytes, parent: bytes | None, group: int | None) -> None:
        """A block is asked for, after the one that it follows."""
        if not self._caches or (group is not None and group >= self._groups):
            return
        held_blocks = self.learnt.held_blocks
        while self._groups > 1 and held_blocks * self._groups > MOST_BLOCKS * GROUPS:
            self._groups //= 2
        capacity = max(held_blocks * self._groups // GROUPS, 1)
        for cache in self._caches.values():
            cache.see(key, parent, capacity)
        self._seen += 1
        if self._seen % SCORE_TICKS == 0:
            self._judge()

    def forget(self, key: bytes) -> None:
        """A block will not be asked for again."""
        for cache in self._caches.values():
            cache.forget(key)

    def _judge(self) -> None:
        hits: dict[Rule, float] = {rule: cache.hits for rule, cache in self._caches.items()}
        best = max(hits, key=lambda rule: hits[rule])
        if hits[best] > MARGIN * hits[self.favourite] + LEAST_MARGIN_HITS:
            self.favourite = best
        for cache in self._caches.values():
            cache.hits *= SCORE_FADE


class _Cache:
    def __init__(self, ranking: FrequencyRanking | DensityRanking) -> None:
        self._ranking = ranking
        self.hits = 0.0  # those of late

    @property
    def keys(self) -> Iterable[bytes]:
        return self._ranking.keys

    def see(self, key: bytes, parent: bytes | None, capacity: int) -> None:
        """Count a hit, or take a block in, as the tier does."""
        if key in self._ranking:
            self.hits += 1
            self._ranking.use(key)
            return
        if parent is not None and parent not in self._ranking:
            return
        spared = () if parent is None else (parent,)
        while len(self._ranking) >= capacity:
            victim = self._ranking.lowest(spared)
            if victim is None:
                return
            self._ranking.leave(victim)
        self._ranking.enter(key, parent)

    def forget(self, key: bytes) -> None:
        if self._ranking.is_leaf(key):
            self._ranking.leave(key)
