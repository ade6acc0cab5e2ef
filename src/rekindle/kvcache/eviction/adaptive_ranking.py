"""A ranking of one tenant's blocks by the rule that has had more hits of late in the tier."""

from __future__ import annotations

from collections.abc import Container

from rekindle.kvcache.eviction.density_ranking import DensityRanking
from rekindle.kvcache.eviction.duel import Duel
from rekindle.kvcache.eviction.frequency_ranking import FrequencyRanking


class AdaptiveRanking:
    """Ranks by both rules all the time, so either can be followed from one eviction to the next."""

    __slots__ = ("_by_density", "_by_frequency", "_duel")

    def __init__(self, duel: Duel) -> None:
        self._duel = duel
        self._by_frequency = FrequencyRanking()
        self._by_density = DensityRanking(duel.learnt)

    def __len__(self) -> int:
        return len(self._by_density)

    def __contains__(self, key: object) -> bool:
        return key in self._by_density

    def enter(self, key: bytes, parent: bytes | None) -> None:
        self._by_frequency.enter(key, parent)
        self._by_density.enter(key, parent)
        self._duel.see(key, parent, self._by_density.group(key))

    def adopt(self, key: bytes, child: bytes) -> None:
        self._by_frequency.adopt(key, child)
        self._by_density.adopt(key, child)

    def use(self, key: bytes) -> None:
        if key in self._by_density:
            self._by_frequency.use(key)
            self._by_density.use(key)
            self._duel.see(key, self._by_density.parent(key), self._by_density.group(key))

    def chance(self, key: bytes) -> float:
        return self._by_density.chance(key)

    def expect(self, key: bytes) -> None:
        self._by_density.expect(key)

    def leave(self, key: bytes) -> None:
        self._by_frequency.leave(key)
        self._by_density.leave(key)
        if key != self._by_density.victim:  # it is of no use any more, in whatever cache
            self._duel.forget(key)

    def lowest(self, spared: Container[bytes]) -> bytes | None:
        self._duel.begin()
        by_density = self._duel.favourite == "hit-density"
        ranking = self._by_density if by_density else self._by_frequency
        victim = ranking.lowest(spared)
        self._by_density.expect(victim)  # whoever chose it: how it fares is learnt
        return victim
