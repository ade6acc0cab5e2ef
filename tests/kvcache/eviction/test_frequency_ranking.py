from __future__ import annotations

from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rekindle.kvcache.eviction.frequency_ranking import FrequencyRanking, Rank
from tests.kvcache.evicting import evict, use
from tests.kvcache.measure import allocated_bytes


class FullCache:
    """Holds so many keys without parents; the lowest makes room for the next."""

    def __init__(self, size: int) -> None:
        self.ranking = FrequencyRanking()
        self.keys: set[bytes] = set()
        self.size = size

    def read(self, key: bytes) -> None:
        if key in self.keys:
            use(self.ranking, [key])
            return
        while len(self.keys) >= self.size:
            victim = evict(self.ranking, set())
            assert victim is not None
            self.keys.remove(victim)
        self.ranking.enter(key, None)
        self.keys.add(key)


def scan(cache: FullCache, times: int) -> None:
    for number in range(times):
        cache.read(b"passing %d" % number)


def test_what_is_used_often_survives_a_scan() -> None:
    cache = FullCache(10)
    for _ in range(5):
        cache.read(b"system prompt")
    scan(cache, 30)
    assert b"system prompt" in cache.keys


def test_what_is_used_again_and_again_survives_any_scan() -> None:
    cache = FullCache(10)
    cache.read(b"system prompt")
    for number in range(1000):
        cache.read(b"passing %d" % number)
        if number % 5 == 0:
            cache.read(b"system prompt")
    assert b"system prompt" in cache.keys


def test_old_fame_fades() -> None:
    cache = FullCache(10)
    for _ in range(5):
        cache.read(b"from yesterday")
    scan(cache, 100)
    assert b"from yesterday" not in cache.keys


def test_of_equals_the_oldest_goes_first() -> None:
    ranking = FrequencyRanking()
    for key in (b"a", b"b", b"c"):
        ranking.enter(key, None)
    use(ranking, [b"a", b"b", b"c"])
    assert [evict(ranking, set()) for _ in range(4)] == [b"a", b"b", b"c", None]


def test_a_use_lifts_what_had_fallen_behind_above_all_newcomers() -> None:
    ranking = FrequencyRanking()
    ranking.enter(b"behind", None)
    for number in range(5):
        ranking.enter(b"%d" % number, None)
        evict(ranking, {b"behind"})
    ranking.enter(b"newcomer", None)
    use(ranking, [b"behind"])
    assert [evict(ranking, set()), evict(ranking, set())] == [b"newcomer", b"behind"]


def test_a_key_that_has_left_is_not_brought_back_by_a_use() -> None:
    ranking = FrequencyRanking()
    ranking.enter(b"a", None)
    ranking.leave(b"a")
    use(ranking, [b"a"])
    assert evict(ranking, set()) is None


def test_a_child_used_without_its_parent_does_not_outlive_it() -> None:
    ranking = FrequencyRanking()
    ranking.enter(b"parent", None)
    ranking.enter(b"child", b"parent")
    use(ranking, [b"child", b"child"])
    assert [evict(ranking, set()), evict(ranking, set())] == [b"child", b"parent"]


def test_endless_use_takes_no_more_memory() -> None:
    ranking = FrequencyRanking()
    ranking.enter(b"a", None)
    assert allocated_bytes(lambda: use(ranking, [b"a"] * 20_000)) < 50_000


class Forest(RuleBasedStateMachine):
    """Trees that grow, are used in any part, and lose leaves; ranked by the plain definition."""

    def __init__(self) -> None:
        super().__init__()
        self.ranking = FrequencyRanking()
        self.parents: dict[bytes, bytes | None] = {}
        self.ranks: dict[bytes, Rank] = {}
        self.floor = 0
        self.names = count()
        self.ticks = count()

    def leaves(self) -> set[bytes]:
        return self.parents.keys() - set(self.parents.values())

    def some(self, data: st.DataObject) -> set[bytes]:
        return data.draw(st.sets(st.sampled_from(sorted(self.parents)))) if self.parents else set()

    def forget(self, key: bytes) -> None:
        del self.parents[key], self.ranks[key]

    @rule(data=st.data())
    def enter(self, data: st.DataObject) -> None:
        key = b"%d" % next(self.names)
        parent = data.draw(st.sampled_from([None, *sorted(self.parents)]))
        self.ranking.enter(key, parent)
        self.parents[key] = parent
        self.ranks[key] = (self.floor + 1, next(self.ticks))

    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        keys = sorted(self.some(data))
        use(self.ranking, [*keys, b"a stranger"])
        for key in keys:
            self.ranks[key] = (max(self.ranks[key][0], self.floor) + 1, next(self.ticks))

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        spared = self.some(data)
        victim = evict(self.ranking, spared)
        open_to_it = self.leaves() - spared
        assert victim == min(open_to_it, key=lambda key: self.ranks[key], default=None)
        if victim is not None:
            self.floor = max(self.floor, self.ranks[victim][0])
            self.forget(victim)

    @precondition(lambda self: self.parents)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.leaves())))
        self.ranking.leave(key)
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
