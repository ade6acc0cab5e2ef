from __future__ import annotations

from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from rekindle.kvcache.eviction.hit_density import HitDensity
from rekindle.kvcache.eviction.policy import HitDensityRanking
from tests.kvcache.evicting import evict, use
from tests.kvcache.measure import allocated_bytes


def test_the_oldest_block_is_evicted_first_before_anything_is_learned() -> None:
    ranking = HitDensityRanking(HitDensity())
    for key in (b"a", b"b", b"c"):
        ranking.add(key, None)
    use(ranking, [b"a"])
    assert [evict(ranking, set()) for _ in range(4)] == [b"b", b"c", b"a", None]


def test_a_child_used_without_its_parent_does_not_outlive_it() -> None:
    ranking = HitDensityRanking(HitDensity())
    ranking.add(b"parent", None)
    ranking.add(b"child", b"parent")
    use(ranking, [b"child", b"child"])
    assert [evict(ranking, set()), evict(ranking, set())] == [b"child", b"parent"]


def test_a_use_does_not_bring_back_an_evicted_block() -> None:
    ranking = HitDensityRanking(HitDensity())
    ranking.add(b"a", None)
    ranking.remove(b"a")
    use(ranking, [b"a"])
    assert evict(ranking, set()) is None


def test_it_learns_to_keep_blocks_that_come_back_through_a_scan() -> None:
    """A hundred conversations take turns, and blocks that never come back pass between them. The
    distance between two turns is larger than the cache, so LRU would never hit."""
    ranking = HitDensityRanking(HitDensity())
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
            ranking.add(key, None)
            held.add(key)
    assert late_hits > 1_500


def test_endless_use_takes_no_more_memory() -> None:
    ranking = HitDensityRanking(HitDensity())
    ranking.add(b"a", None)
    use(ranking, [b"a"] * 2000)
    assert allocated_bytes(lambda: use(ranking, [b"a"] * 20_000)) < 50_000


class Forest(RuleBasedStateMachine):
    """Trees of blocks that grow, are used in any part, and lose leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.ranking = HitDensityRanking(HitDensity())
        self.parents: dict[bytes, bytes | None] = {}
        self.names = count()

    def leaves(self) -> set[bytes]:
        return self.parents.keys() - set(self.parents.values())

    def some(self, data: st.DataObject) -> set[bytes]:
        return data.draw(st.sets(st.sampled_from(sorted(self.parents)))) if self.parents else set()

    @rule(data=st.data(), blocks=st.integers(1, 200))
    def enter(self, data: st.DataObject, blocks: int) -> None:
        parent = data.draw(st.sampled_from([None, *sorted(self.parents)]))
        for _ in range(blocks):
            key = b"%d" % next(self.names)
            self.ranking.add(key, parent)
            self.parents[key] = parent

    @rule(data=st.data(), times=st.integers(1, 300))
    def use(self, data: st.DataObject, times: int) -> None:
        use(self.ranking, [*sorted(self.some(data)), b"a stranger"] * times)

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        """A leaf is evicted whenever one is not excluded."""
        excluded = self.some(data)
        expected = self.ranking.next_victim(excluded)
        victim = evict(self.ranking, excluded)
        assert victim == expected
        open_to_it = self.leaves() - excluded
        assert victim in open_to_it if open_to_it else victim is None
        if victim is not None:
            del self.parents[victim]

    @precondition(lambda self: self.parents)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.leaves())))
        self.ranking.remove(key)
        del self.parents[key]

    def teardown(self) -> None:
        for _ in range(len(self.parents)):
            victim = evict(self.ranking, set())
            assert victim in self.leaves()
            del self.parents[victim]
        assert evict(self.ranking, set()) is None
        assert not len(self.ranking)


TestForest = Forest.TestCase
TestForest.settings = settings(max_examples=15, stateful_step_count=15, deadline=None)
