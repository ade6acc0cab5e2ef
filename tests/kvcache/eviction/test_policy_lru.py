from __future__ import annotations

from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rekindle.kvcache.eviction.policy import LruRanking
from tests.kvcache.evicting import evict, use
from tests.kvcache.measure import allocated_bytes


def test_the_least_recently_used_block_is_evicted_first() -> None:
    ranking = LruRanking()
    for key in (b"a", b"b", b"c"):
        ranking.add(key, None)
    use(ranking, [b"a"])
    assert [evict(ranking, set()) for _ in range(4)] == [b"b", b"c", b"a", None]


def test_a_use_does_not_bring_back_an_evicted_block() -> None:
    ranking = LruRanking()
    ranking.add(b"a", None)
    ranking.remove(b"a")
    use(ranking, [b"a"])
    assert evict(ranking, set()) is None


def test_a_child_used_without_its_parent_does_not_outlive_it() -> None:
    ranking = LruRanking()
    ranking.add(b"parent", None)
    ranking.add(b"child", b"parent")
    use(ranking, [b"child", b"child"])
    assert [evict(ranking, set()), evict(ranking, set())] == [b"child", b"parent"]


def test_endless_use_takes_no_more_memory() -> None:
    ranking = LruRanking()
    ranking.add(b"a", None)
    assert allocated_bytes(lambda: use(ranking, [b"a"] * 20_000)) < 50_000


class CountedKeys(set[bytes]):
    """Counts how often somebody asks whether a key is in the set."""

    lookups = 0

    def __contains__(self, key: object) -> bool:
        self.lookups += 1
        return super().__contains__(key)


def test_a_victim_is_found_with_one_look_at_each_excluded_leaf() -> None:
    ranking, excluded = LruRanking(), CountedKeys(b"%d" % number for number in range(1000))
    for key in (*sorted(excluded), b"last"):
        ranking.add(key, None)
    for _ in range(3):
        excluded.lookups = 0
        assert ranking.next_victim(excluded) == b"last"
        assert excluded.lookups == 1001


class Forest(RuleBasedStateMachine):
    """Trees of blocks that grow, are used in any part, and lose leaves, next to a plain model."""

    def __init__(self) -> None:
        super().__init__()
        self.ranking = LruRanking()
        self.parents: dict[bytes, bytes | None] = {}
        self.used: dict[bytes, int] = {}
        self.names = count()
        self.ticks = count()

    def leaves(self) -> set[bytes]:
        return self.parents.keys() - set(self.parents.values())

    def some(self, data: st.DataObject) -> set[bytes]:
        return data.draw(st.sets(st.sampled_from(sorted(self.parents)))) if self.parents else set()

    def forget(self, key: bytes) -> None:
        del self.parents[key], self.used[key]

    @rule(data=st.data())
    def enter(self, data: st.DataObject) -> None:
        key = b"%d" % next(self.names)
        parent = data.draw(st.sampled_from([None, *sorted(self.parents)]))
        self.ranking.add(key, parent)
        self.parents[key] = parent
        self.used[key] = next(self.ticks)

    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        keys = sorted(self.some(data))
        use(self.ranking, [*keys, b"a stranger"])
        for key in keys:
            self.used[key] = next(self.ticks)

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        excluded = self.some(data)
        victim = evict(self.ranking, excluded)
        open_to_it = self.leaves() - excluded
        assert victim == min(open_to_it, key=lambda key: self.used[key], default=None)
        if victim is not None:
            self.forget(victim)

    @precondition(lambda self: self.parents)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.leaves())))
        self.ranking.remove(key)
        self.forget(key)

    @invariant()
    def parents_are_there(self) -> None:
        assert all(parent is None or parent in self.parents for parent in self.parents.values())

    def teardown(self) -> None:
        for _ in range(len(self.parents)):
            victim = evict(self.ranking, set())
            assert victim in self.leaves()
            self.forget(victim)
        assert evict(self.ranking, set()) is None


TestForest = Forest.TestCase
TestForest.settings = settings(max_examples=60, stateful_step_count=40)
