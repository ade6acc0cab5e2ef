"""What tests do with rankings, of whatever rule."""

from __future__ import annotations

from collections.abc import Container, Iterable

from rekindle.kvcache.eviction.policy import Ranking


def evict(ranking: Ranking, spared: Container[bytes] = ()) -> bytes | None:
    """Have the lowest leaf leave."""
    victim = ranking.lowest(spared)
    if victim is not None:
        ranking.leave(victim)
    return victim


def use(ranking: Ranking, keys: Iterable[bytes]) -> None:
    for key in keys:
        ranking.use(key)
