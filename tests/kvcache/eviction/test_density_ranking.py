from __future__ import annotations

from itertools import count
from typing import get_args

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from rekindle.kvcache.eviction.adaptive_ranking import AdaptiveRanking
from rekindle.kvcache.eviction.density_ranking import DensityRanking
from rekindle.kvcache.eviction.duel import Duel, Rule
from rekindle.kvcache.eviction.hit_density import HitDensity
from rekindle.kvcache.eviction.policy import Ranking
from tests.kvcache.evicting import evict, use
from tests.kvcache.measure import allocated_bytes


def test_before_anything_is_learnt_the_oldest_goes_first() -> None:
    ranking = DensityRanking(HitDensity())
    for key in (b"a", b"b", b"c"):
        ranking.enter(key, None)
    use(ranking, [b"a"])
    assert [evict(ranking, set()) for _ in range(4)] == [b"b", b"c", b"a", None]


def test_a_child_used_without_its_parent_does_not_outlive_it() -> None:
    ranking = DensityRanking(HitDensity())
    ranking.enter(b"parent", None)
    ranking.enter(b"child", b"parent")
    use(ranking, [b"child", b"child"])
    assert [evict(ranking, set()), evict(ranking, set())] == [b"child", b"parent"]


def test_a_key_that_has_left_is_not_brought_back_by_a_use() -> None:
    ranking = DensityRanking(HitDensity())
    ranking.enter(b"a", None)
    ranking.leave(b"a")
    use(ranking, [b"a"])
    assert evict(ranking, set()) is None


def test_it_learns_to_keep_what_comes_back_when_a_scan_would_push_it_out() -> None:
    """A hundred conversations take turns, further apart than the cache is long; between them
    passes what never comes back. The oldest first would never hit."""
    ranking = DensityRanking(HitDensity())
    held: set[bytes] = set()
    late_hits = 0
    passing = count(1 << 30)
    for turn in range(6_000):
        keys = [b"%08d again" % (turn % 100), *(b"%08x passing" % next(passing) for _ in range(3))]
        for key in keys:
            if key in held:
                late_hits += turn >= 3_000
                use(ranking, [key])
                continue
            if len(held) >= 200:
                victim = evict(ranking, set())
                assert victim is not None
                held.remove(victim)
            ranking.enter(key, None)
            held.add(key)
    assert late_hits > 1_500


def test_endless_use_takes_no_more_memory() -> None:
    ranking = DensityRanking(HitDensity())
    ranking.enter(b"a", None)
    use(ranking, [b"a"] * 2000)
    assert allocated_bytes(lambda: use(ranking, [b"a"] * 20_000)) < 50_000


class Forest(RuleBasedStateMachine):
    """Trees that grow, are used in any part, and lose leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.ranking = self.new_ranking()
        self.parents: dict[bytes, bytes | None] = {}
        self.names = count()

    def new_ranking(self) -> Ranking:
        return DensityRanking(HitDensity())

    def leaves(self) -> set[bytes]:
        return self.parents.keys() - set(self.parents.values())

    def some(self, data: st.DataObject) -> set[bytes]:
        return data.draw(st.sets(st.sampled_from(sorted(self.parents)))) if self.parents else set()

    @rule(data=st.data(), blocks=st.integers(1, 200))
    def enter(self, data: st.DataObject, blocks: int) -> None:
        parent = data.draw(st.sampled_from([None, *sorted(self.parents)]))
        for _ in range(blocks):
            key = b"%d" % next(self.names)
            self.ranking.enter(key, parent)
            self.parents[key] = parent

    @rule(data=st.data(), times=st.integers(1, 300))
    def use(self, data: st.DataObject, times: int) -> None:
        use(self.ranking, [*sorted(self.some(data)), b"a stranger"] * times)

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        """Some leaf goes whenever there is one that is not spared."""
        spared = self.some(data)
        expected = self.ranking.lowest(spared)
        victim = evict(self.ranking, spared)
        assert victim == expected
        open_to_it = self.leaves() - spared
        assert victim in open_to_it if open_to_it else victim is None
        if victim is not None:
            del self.parents[victim]

    @precondition(lambda self: self.parents)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.leaves())))
        self.ranking.leave(key)
        del self.parents[key]

    def teardown(self) -> None:
        for _ in range(len(self.parents)):
            victim = evict(self.ranking, set())
            assert victim in self.leaves()
            del self.parents[victim]
        assert evict(self.ranking, set()) is None
        assert not len(self.ranking)


class AdaptiveForest(Forest):
    """By either rule, while two caches without state look on."""

    def new_ranking(self) -> Ranking:
        self.duel = Duel()
        return AdaptiveRanking(self.duel)

    @rule(favourite=st.sampled_from(get_args(Rule)))
    def change(self, favourite: Rule) -> None:
        self.duel.favourite = favourite


TestAdaptiveForest = AdaptiveForest.TestCase
TestAdaptiveForest.settings = settings(max_examples=15, stateful_step_count=15, deadline=None)
TestForest = Forest.TestCase
TestForest.settings = settings(max_examples=15, stateful_step_count=15, deadline=None)
