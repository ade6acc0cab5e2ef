from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from rekindle.kvcache.eviction.adaptive_ranking import AdaptiveRanking
from rekindle.kvcache.eviction.density_ranking import COMMON, GROUPS
from rekindle.kvcache.eviction.duel import Duel
from tests.kvcache.evicting import evict


class Tier:
    """So many blocks without parents, ranked by the better rule."""

    def __init__(self, size: int) -> None:
        self.duel = Duel()
        self.ranking = AdaptiveRanking(self.duel)
        self.size = size

    def read(self, key: bytes) -> bool:
        if key in self.ranking:
            self.ranking.use(key)
            return True
        if len(self.ranking) >= self.size:
            evict(self.ranking)
        self.ranking.enter(key, None)
        return False


def cycle(blocks: int) -> Iterator[bytes]:
    """Blocks that come back further apart than the tier is long: the oldest first never hits."""
    return (b"%c%07d" % (number % blocks % GROUPS, number % blocks) for number in count())


def test_what_the_oldest_first_would_never_hit_is_hit_by_what_was_learnt() -> None:
    tier, keys = Tier(200), cycle(400)
    hits = [tier.read(next(keys)) for _ in range(10_000)]
    assert tier.duel.favourite == "hit-density"
    assert sum(hits[5_000:]) > 1_000


def test_when_learning_misleads_the_tier_evicts_by_frequency(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is made to keep the oldest here, while everybody goes on to something new."""
    monkeypatch.setattr(
        "rekindle.kvcache.eviction.hit_density.densities",
        lambda hits, lives: sorted(range(len(hits))),
    )
    tier = Tier(100)
    hits = [
        tier.read(b"%c%03d%04d" % (number % GROUPS, topic, number))
        for topic in range(60)
        for _ in range(4)
        for number in range(50)
    ]
    assert tier.duel.favourite == "frequency"
    assert sum(hits[-2000:]) > 1000


def test_nothing_is_seen_while_there_is_room() -> None:
    tier, keys = Tier(1000), cycle(500)
    for _ in range(1000):
        tier.read(next(keys))
    assert not tier.duel.is_on


def test_a_conversation_is_seen_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what many begin with always."""
    monkeypatch.setattr("rekindle.kvcache.eviction.duel.MOST_BLOCKS", 250)
    tier, prompt = Tier(1000), b"\xffprompt"
    for number in range(1001):
        tier.read(b"%c%07d" % (number % GROUPS, number))
    tier.read(prompt)
    conversations = [[b"%c of %d" % (number, at) for at in range(3)] for number in range(GROUPS)]
    for keys in conversations[::4]:
        tier.ranking.use(prompt)
        for key, parent in zip(keys, (prompt, *keys), strict=False):
            evict(tier.ranking, (parent, prompt))
            tier.ranking.enter(key, parent)
    seen = tier.duel.seen_keys()
    assert prompt in seen
    later = conversations[::4][COMMON:]
    whole = [sum(key in seen for key in keys) for keys in later]
    assert set(whole) == {0, 3}
    assert 0 < whole.count(3) < len(whole) // 2


def test_however_large_the_tier_its_duel_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rekindle.kvcache.eviction.duel.MOST_BLOCKS", 64)
    tier, keys = Tier(600), cycle(4000)
    for _ in range(4000):
        tier.read(next(keys))
    assert 30 < len(tier.duel.seen_keys()) <= 2 * 64


def test_what_was_removed_and_not_evicted_is_not_seen_either() -> None:
    tier, keys = Tier(100), cycle(500)
    for _ in range(300):
        tier.read(next(keys))
    tail = b"\0 a tail"
    tier.read(tail)
    assert tail in tier.duel.seen_keys()
    tier.ranking.leave(tail)
    assert tail not in tier.duel.seen_keys()
