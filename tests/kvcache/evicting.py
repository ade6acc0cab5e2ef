"""Helpers for tests of rankings."""

from __future__ import annotations

from collections.abc import Container, Iterable

from rekindle.kvcache.eviction.policy import Ranking


def evict(ranking: Ranking, excluded: Container[bytes] = ()) -> bytes | None:
    """Remove the next victim and return it."""
    victim = ranking.next_victim(excluded)
    if victim is not None:
        ranking.remove(victim)
    return victim


def use(ranking: Ranking, keys: Iterable[bytes]) -> None:
    for key in keys:
        ranking.use(key)
