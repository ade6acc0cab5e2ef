from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count, product
from typing import NamedTuple, get_args

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rekindle.kvcache import block as blocks
from rekindle.kvcache.block import Block, chain_key
from rekindle.kvcache.eviction.hit_density import HitDensity
from rekindle.kvcache.eviction.policy import HitDensityRanking, new_ranking
from rekindle.kvcache.store import Store, StoreCounts
from rekindle.kvcache.tiers.ram import RamTier, cost_bytes
from rekindle.protocol.settings import EvictionPolicy
from rekindle.tokens import Tokens, pack
from tests.support.rounds import rounds

from .evicting import evict, use
from .measure import allocated_bytes
from .naive import (
    ROOT,
    STRANGER,
    Ids,
    ends,
    few_names,
    goes_another_way,
    last_block,
    longest,
    parent_of,
    runs,
)

BLOCK_TOKENS = 3
PLENTY_BYTES = 1 << 20


def name(path: Ids) -> bytes:
    key = ROOT
    for end in ends(path, BLOCK_TOKENS):
        key = blocks.chain_key(key, Tokens.of(last_block(end, BLOCK_TOKENS)))
    return key


def put(store: Store, path: Ids, blob: bytes, *, exact: bool = False) -> bool:
    """Put the last block of a path under its parent."""
    parent = name(parent_of(path, BLOCK_TOKENS))
    return store.put(ROOT, parent, Tokens.of(last_block(path, BLOCK_TOKENS)), blob, exact=exact)


def wants(store: Store, path: Ids, *, exact: bool = False) -> bool:
    parent = name(parent_of(path, BLOCK_TOKENS))
    return store.wants(parent, Tokens.of(last_block(path, BLOCK_TOKENS)), exact=exact)


def find(store: Store, path: Ids) -> Block | None:
    """The block that ends where the path does."""
    match = store.match(ROOT, Tokens.of(path))
    found = match.tokens == len(path) and match.blocks and match.blocks[-1].stop == len(path)
    return match.blocks[-1] if found else None


def keep(store: Store, path: Ids, *, exact: bool = False) -> None:
    """Put every wanted block of a path, with its path as its state."""
    for end in ends(path, BLOCK_TOKENS):
        if wants(store, end, exact=exact) and not put(store, end, pack(end), exact=exact):
            return


def room_for(blocks: int, eviction: EvictionPolicy = "hit-density") -> Store:
    """A store for this many blocks with ten bytes of state."""
    cost = cost_bytes(Tokens.of([0] * BLOCK_TOKENS), 10)
    return Store(block_tokens=BLOCK_TOKENS, tiers=[RamTier(blocks * cost, eviction)])


class Kept(NamedTuple):
    blob: bytes
    exact: bool


class StoreMachine(RuleBasedStateMachine):
    """Compares the store with a dictionary. The dictionary forgets what the store evicts, and
    must agree with the rest."""

    @initialize(
        limit_bytes=st.integers(0, 14).map(lambda blocks: blocks * 1600),
        policy=st.sampled_from(get_args(EvictionPolicy)),
    )
    def open(self, limit_bytes: int, policy: EvictionPolicy) -> None:
        self.store = Store(block_tokens=BLOCK_TOKENS, tiers=[RamTier(limit_bytes, policy)])
        self.known: set[Ids] = set()
        self.kept: dict[Ids, Kept] = {}
        self.handles: list[tuple[Ids, Block]] = []
        self.states = count()

    def look(self) -> dict[Ids, Kept]:
        """Everything that the store returns for the paths that were ever put."""
        seen = {}
        for path in self.known:
            if block := find(self.store, path):
                blob = self.store.get(block)
                assert blob is not None
                seen[path] = Kept(bytes(blob), block.exact)
        return seen

    def path(self, data: st.DataObject) -> Ids:
        """Usually a block after a stored one, sometimes one without a parent."""
        above = data.draw(st.sampled_from([(), *sorted(self.kept)]) | runs)
        path: Ids = above + data.draw(st.lists(st.integers(0, 2), min_size=1).map(tuple))
        return path[: len(parent_of((*above, 0), BLOCK_TOKENS)) + BLOCK_TOKENS]

    @rule(data=st.data(), size_bytes=st.integers(0, 900), exact=st.booleans())
    def put(self, data: st.DataObject, size_bytes: int, exact: bool) -> None:
        path = self.path(data)
        blob = b"%d:" % next(self.states) + bytes(size_bytes)
        wanted = wants(self.store, path, exact=exact)
        self.known.add(path)
        taken = put(self.store, path, blob, exact=exact)
        seen = self.look()
        parent = parent_of(path, BLOCK_TOKENS)
        if not taken:
            assert wanted
            assert seen == self.kept
            assert parent not in ((), *self.kept) or not self.could_fit(path, blob)
        elif not wanted:
            assert seen == self.kept
        else:
            assert seen.pop(path) == Kept(blob, exact)
            assert seen.items() <= self.kept.items()
            assert path not in self.kept or (exact and not self.kept[path].exact)
        self.kept = self.look()

    def could_fit(self, path: Ids, blob: bytes) -> bool:
        """Whether the chain up to this block fits into the budget alone."""
        chain = [(end, self.kept[end].blob) for end in ends(path, BLOCK_TOKENS)[:-1]]
        return cost(*chain, (path, blob)) <= self.store.tiers[0].budget.limit_bytes

    @rule(data=st.data(), tail=runs)
    def put_without_a_full_parent(self, data: st.DataObject, tail: Ids) -> None:
        gone = self.known - self.kept.keys()
        tails = {path for path in self.kept if len(path) % BLOCK_TOKENS}
        above = data.draw(st.sampled_from(sorted(gone | tails) or [(7, 7, 7)]))
        packed = Tokens.of(tail[:BLOCK_TOKENS] or (0,))
        assert not self.store.put(ROOT, name(above), packed, b"lost", exact=True)

    @rule(data=st.data())
    def use_part_of_a_chain(self, data: st.DataObject) -> None:
        match = self.store.match(ROOT, Tokens.of(self.path(data)))
        self.store.use(list(match.blocks[data.draw(st.integers(0, 2)) :]))

    @rule(data=st.data())
    def use_what_may_have_gone(self, data: st.DataObject) -> None:
        if self.handles:
            self.store.use([data.draw(st.sampled_from(self.handles))[1]])

    @rule(request=runs)
    def match(self, request: Ids) -> None:
        match = self.store.match(ROOT, Tokens.of(request))
        assert match.tokens == longest(self.kept, request)
        assert match.diverged == goes_another_way(self.kept, request)
        for block in match.blocks:
            path = request[: block.start] + tuple(block.tokens.ids())
            self.handles.append((path, block))
        assert self.store.match(STRANGER, Tokens.of(request)).tokens == 0

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        if not self.handles:
            return
        path, block = data.draw(st.sampled_from(self.handles))
        was_there = self.store.get(block) is not None
        self.store.drop(block)
        if was_there:
            for other in [other for other in self.kept if path in ends(other, BLOCK_TOKENS)]:
                del self.kept[other]

    @invariant()
    def everything_kept_is_there_and_nothing_else(self) -> None:
        assert self.look() == self.kept
        assert len(self.store) == len(self.kept)

    @invariant()
    def every_block_has_its_parents(self) -> None:
        for path in self.kept:
            assert set(ends(path, BLOCK_TOKENS)) <= self.kept.keys()

    @invariant()
    def the_budget_holds(self) -> None:
        blobs = [(path, kept.blob) for path, kept in self.kept.items()]
        budget = self.store.tiers[0].budget
        assert cost(*blobs) == budget.used_bytes <= budget.limit_bytes

    @invariant()
    def no_tail_is_kept_beside_a_block_that_covers_it(self) -> None:
        for path, kept in self.kept.items():
            for other, beside in self.kept.items():
                siblings = parent_of(path, BLOCK_TOKENS) == parent_of(other, BLOCK_TOKENS)
                if siblings and path != other and starts(other, path):
                    assert kept.exact
                    assert not beside.exact

    @invariant()
    def a_handle_gives_the_state_of_its_own_tokens_or_none(self) -> None:
        for path, block in self.handles:
            blob = self.store.get(block)
            assert blob is None or blob == self.kept[path].blob


def cost(*blocks: tuple[Ids, bytes]) -> int:
    return sum(
        cost_bytes(Tokens.of(last_block(path, BLOCK_TOKENS)), len(blob)) for path, blob in blocks
    )


def starts(path: Ids, beginning: Ids) -> bool:
    return path[: len(beginning)] == beginning


TestStoreMachine = pytest.mark.long(StoreMachine.TestCase)
TestStoreMachine.settings = settings(max_examples=rounds(80, 800), stateful_step_count=40)


def test_a_hundred_chains_on_one_prefix_store_it_once() -> None:
    store = Store(block_tokens=BLOCK_TOKENS, tiers=[RamTier(PLENTY_BYTES)])
    system = (1, 2, 3, 4, 5, 6, 7, 8, 9)
    for number in range(100):
        keep(store, (*system, number, number))
    assert len(store) == 3 + 100
    states = [pack(end) for end in ends(system, BLOCK_TOKENS)]
    states += [pack((*system, number, number)) for number in range(100)]
    assert store.counts.stored_bytes == sum(map(len, states))
    assert store.counts.stored_blocks == 103


def test_a_second_turn_stores_only_new_blocks() -> None:
    store = Store(block_tokens=BLOCK_TOKENS, tiers=[RamTier(PLENTY_BYTES)])
    keep(store, (1, 2, 3, 4, 5, 6, 7))
    before = store.counts.stored_blocks
    keep(store, (1, 2, 3, 4, 5, 6, 7, 8, 9, 10))
    assert store.counts.stored_blocks == before + 2


def test_an_exact_block_replaces_an_inexact_one_and_never_the_reverse() -> None:
    store = Store(block_tokens=BLOCK_TOKENS, tiers=[RamTier(PLENTY_BYTES)])
    path = (1, 2, 3)
    assert put(store, path, b"decoded")
    assert not wants(store, path)
    assert wants(store, path, exact=True)
    assert put(store, path, b"prefilled", exact=True)
    assert not wants(store, path)
    assert not wants(store, path, exact=True)
    assert put(store, path, b"decoded again")
    assert put(store, path, b"prefilled again", exact=True)
    block = find(store, path)
    assert block is not None
    assert block.exact
    assert store.get(block) == b"prefilled"


def test_replacing_a_block_by_a_larger_one_counts_its_bytes() -> None:
    store = room_for(3)
    for token in (1, 2, 3):
        assert put(store, (token,) * 3, bytes(10))
    assert put(store, (2, 2, 2), bytes(11), exact=True)
    assert len(store) == 2
    assert store.tiers[0].budget.used_bytes <= store.tiers[0].budget.limit_bytes
    assert store.counts.evicted_blocks == 1
    assert not put(store, (1, 1, 1), bytes(store.tiers[0].budget.limit_bytes), exact=True)
    assert len(store) == 2


def test_a_chain_that_fills_the_budget_evicts_nothing_for_another_block() -> None:
    store = room_for(3)
    assert put(store, (1, 1, 1), bytes(10))
    assert put(store, (1, 1, 1), bytes(1500), exact=True)
    assert put(store, (2,), b"")
    assert not put(store, (1, 1, 1, 2, 2, 2), bytes(1500))
    assert len(store) == 2


def test_removed_namespaces_take_no_memory() -> None:
    store = Store(block_tokens=BLOCK_TOKENS, tiers=[RamTier(PLENTY_BYTES)])

    def come_and_go() -> None:
        for number in range(500):
            root = b"%d" % number
            assert store.put(root, root, Tokens.of([1]), b"", exact=False)
            store.drop(store.match(root, Tokens.of([1])).blocks[0])

    assert allocated_bytes(come_and_go) < 50_000


def test_a_longer_tail_replaces_the_tails_that_it_covers() -> None:
    store = Store(block_tokens=BLOCK_TOKENS, tiers=[RamTier(PLENTY_BYTES)])
    assert put(store, (1,), b"one")
    assert put(store, (1, 2), b"two")
    assert put(store, (1, 2, 3), b"three")
    assert len(store) == 1
    assert store.match(ROOT, Tokens.of([1, 2])).tokens == 2


def test_a_tail_that_is_covered_already_is_not_wanted() -> None:
    store = Store(block_tokens=BLOCK_TOKENS, tiers=[RamTier(PLENTY_BYTES)])
    assert put(store, (1, 2, 3), b"three")
    assert not wants(store, (1, 2))
    assert put(store, (1, 2), b"two")
    assert len(store) == 1


def test_an_exact_tail_is_replaced_only_by_an_exact_block() -> None:
    store = Store(block_tokens=BLOCK_TOKENS, tiers=[RamTier(PLENTY_BYTES)])
    assert put(store, (1, 2), b"exact tail", exact=True)
    assert put(store, (1, 2, 3), b"decoded")
    assert len(store) == 2
    assert put(store, (1, 2, 3), b"prefilled", exact=True)
    assert len(store) == 1


def test_an_exact_tail_is_wanted_next_to_a_longer_inexact_block() -> None:
    store = Store(block_tokens=BLOCK_TOKENS, tiers=[RamTier(PLENTY_BYTES)])
    assert put(store, (1, 2, 3), b"decoded")
    assert wants(store, (1, 2), exact=True)
    assert put(store, (1, 2), b"exact tail", exact=True)
    assert len(store) == 2


def test_a_block_without_its_parent_is_refused() -> None:
    store = Store(block_tokens=BLOCK_TOKENS, tiers=[RamTier(PLENTY_BYTES)])
    assert not put(store, (1, 2, 3, 4), b"orphan")
    assert put(store, (1, 2, 3), b"parent")
    assert put(store, (1, 2, 3, 4), b"child")


def test_a_block_after_a_tail_is_refused() -> None:
    store = Store(block_tokens=BLOCK_TOKENS, tiers=[RamTier(PLENTY_BYTES)])
    assert put(store, (1, 2), b"tail")
    assert not store.put(ROOT, name((1, 2)), Tokens.of([3]), b"beyond", exact=False)
    assert len(store) == 1


def test_a_block_that_can_never_fit_evicts_nothing() -> None:
    store = room_for(4)
    for path in ((1, 1, 1), (1, 1, 1, 2, 2, 2), (3, 3, 3)):
        assert put(store, path, bytes(10))
    assert not put(store, (1, 1, 1, 2, 2, 2, 4), bytes(store.tiers[0].budget.limit_bytes // 2))
    assert len(store) == 3
    assert store.counts == StoreCounts(stored_blocks=3, stored_bytes=30, refused_blocks=1)


def test_a_store_without_memory_refuses_every_block() -> None:
    store = Store(block_tokens=BLOCK_TOKENS, tiers=[RamTier(0)])
    assert not put(store, (1, 2, 3), b"state")
    assert store.match(ROOT, Tokens.of([1, 2, 3])).blocks == ()
    assert store.counts == StoreCounts(refused_blocks=1)


def test_blocks_that_are_used_without_their_parents_are_still_evicted_first() -> None:
    store = room_for(4, "lru")
    path = (1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4)
    for end in ends(path, BLOCK_TOKENS):
        assert put(store, end, bytes(10))
    restored = store.match(ROOT, Tokens.of(path)).blocks[2:]  # the rest was shared on the device
    store.use(list(restored))
    for token in (5, 6, 7):
        assert put(store, (token,) * 3, bytes(10))
    assert store.match(ROOT, Tokens.of(path)).tokens == 3


def test_a_very_long_chain_can_be_dropped() -> None:
    store = Store(block_tokens=1, tiers=[RamTier(1 << 30)])
    parent = ROOT
    for token in range(3000):
        assert store.put(ROOT, parent, Tokens.of([token]), b"", exact=False)
        parent = chain_key(parent, Tokens.of([token]))
    store.drop(store.match(ROOT, Tokens.of([0])).blocks[0])
    assert len(store) == store.tiers[0].budget.used_bytes == 0


def test_an_evicted_block_can_be_stored_again() -> None:
    store = room_for(1)
    assert put(store, (1, 1, 1), b"1st state.")
    stale = find(store, (1, 1, 1))
    assert stale is not None
    assert put(store, (2, 2, 2), b"2nd state.")
    assert store.get(stale) is None
    store.drop(stale)
    assert put(store, (1, 1, 1), b"3rd state.")
    fresh = find(store, (1, 1, 1))
    assert fresh is not None
    assert store.get(fresh) == b"3rd state."


def mixtures(paths: list[Ids]) -> Iterator[Ids]:
    """Every path, and every prefix of one with the rest of another."""
    for one, other in product(paths, paths):
        for cut in range(0, len(one) + 1, BLOCK_TOKENS):
            yield one[:cut] + other[cut:]


@given(
    st.lists(st.tuples(runs, st.booleans()), max_size=8),
    st.sampled_from([1, 3, 8]),
    st.integers(1, 12),
)
def test_colliding_keys_never_give_the_state_of_other_tokens(
    stored: list[tuple[Ids, bool]], names: int, blocks: int
) -> None:
    with few_names(names):
        store = Store(block_tokens=BLOCK_TOKENS, tiers=[RamTier(blocks * 1600)])
        for path, exact in stored:
            keep(store, path, exact=exact)
            for request in mixtures([path for path, _ in stored]):
                match = store.match(ROOT, Tokens.of(request))
                for block in match.blocks:
                    run = request[: block.start] + tuple(block.tokens.ids())
                    assert store.get(block) == pack(run)
                    assert run[: match.tokens] == request[: match.tokens][: len(run)]


def test_a_handle_never_gives_the_state_of_a_block_with_the_same_key() -> None:
    with few_names(1):
        store = Store(block_tokens=BLOCK_TOKENS, tiers=[RamTier(PLENTY_BYTES)])
        assert put(store, (1, 2, 3), b"mine", exact=False)
        block = find(store, (1, 2, 3))
        assert block is not None
        assert not put(store, (4, 5, 6), b"another's", exact=True)
        assert store.get(block) == b"mine"
        store.drop(block)
        assert put(store, (4, 5, 6), b"another's", exact=True)
        assert store.get(block) is None


@pytest.mark.parametrize("policy", get_args(EvictionPolicy))
def test_the_store_has_exactly_the_hits_of_its_policy(policy: EvictionPolicy) -> None:
    """Conversations continue in random order in a store of fifty blocks of one token."""
    cost = cost_bytes(Tokens.of([0]), 1)
    store = Store(block_tokens=1, tiers=[RamTier(50 * cost, policy)])
    ranking = new_ranking(policy, HitDensity())
    alone: set[bytes] = set()
    chance = random.Random(7)
    hits = 0
    for _ in range(600):
        path = [0, *([chance.randrange(1, 12)] * chance.randrange(1, 12))]
        found = store.match(ROOT, Tokens.of(path)).blocks
        store.use(found)
        keys = [ROOT]
        for token in path:
            keys.append(chain_key(keys[-1], Tokens.of([token])))
        known = next((at for at, key in enumerate(keys[1:]) if key not in alone), len(path))
        assert len(found) == known
        hits += known
        use(ranking, keys[1 : known + 1])
        for at in range(known, len(path)):
            assert store.put(ROOT, keys[at], Tokens.of([path[at]]), b"x", exact=False)
            if len(alone) == 50:
                victim = evict(ranking, {keys[at]})
                assert victim is not None
                alone.remove(victim)
            ranking.add(keys[at + 1], keys[at] if at else None)
            alone.add(keys[at + 1])
    assert hits > 600


def test_the_store_has_as_many_hits_as_a_simulation_with_other_keys() -> None:
    """Keys decide which blocks share a set of ghosts, which changes the hits by at most two
    percent."""
    requests = conversations(1200)
    cost = cost_bytes(Tokens.of([0]), 1)
    store = Store(block_tokens=1, tiers=[RamTier(300 * cost)])
    stored = 0
    for path in requests:
        found = store.match(ROOT, Tokens.of(path)).blocks
        store.use(found)
        stored += len(found)
        parent = found[-1].key if found else ROOT
        for token in path[len(found) :]:
            assert store.put(ROOT, parent, Tokens.of([token]), b"x", exact=False)
            parent = chain_key(parent, Tokens.of([token]))
    assert stored > sum(map(len, requests)) // 10
    assert abs(simulated_hits(requests, 300) - stored) < 0.02 * stored


def conversations(turns: int) -> list[list[int]]:
    """Requests of which one in three continues one of the last forty. All begin with the same
    three blocks."""
    chance, names = random.Random(11), count(3)
    paths: list[list[int]] = []
    for _ in range(turns):
        goes_on = paths and chance.random() < 0.35
        path = chance.choice(paths[-40:]) if goes_on else [0, 1, 2]
        paths.append([*path, *(next(names) for _ in range(chance.randrange(2, 12)))])
    return paths


def simulated_hits(requests: list[list[int]], capacity: int) -> int:
    ranking, hits = HitDensityRanking(HitDensity()), 0
    for path in requests:
        keys = [blake3(b"a block %d" % token).digest() for token in path]
        known = next((at for at, key in enumerate(keys) if key not in ranking), len(keys))
        hits += known
        use(ranking, keys[:known])
        for at in range(known, len(keys)):
            above = keys[at - 1] if at else None
            while len(ranking) >= capacity:
                evict(ranking, () if above is None else (above,))
            ranking.add(keys[at], above)
    return hits
