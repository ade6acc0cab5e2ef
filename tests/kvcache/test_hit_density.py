from __future__ import annotations

from rekindle.kvcache.hit_density import (
    AGES,
    EDGES,
    GHOSTS,
    HitDensity,
    age_bin,
    densities,
)

from .measure import allocated_bytes


def test_an_age_is_in_the_bin_whose_edges_are_around_it() -> None:
    for ticks in (1, 2, 3, 10, 1000, 10**6, 10**9):
        assert EDGES[age_bin(ticks)] <= ticks < EDGES[age_bin(ticks) + 1]
    assert age_bin(0) == 0
    assert age_bin(10**30) == AGES - 1


def test_what_is_used_again_soon_is_worth_more_than_what_is_used_again_late() -> None:
    soon, late = [0.0] * AGES, [0.0] * AGES
    soon[3], late[12] = 10.0, 10.0
    assert densities(soon, soon)[0] > densities(late, late)[0]


def test_the_worth_looks_ahead_to_the_age_at_which_hits_come() -> None:
    """A block that has nearly reached it is worth more than one just used."""
    hits = [0.0] * AGES
    hits[12] = 10.0
    worths = densities(hits, hits)
    assert worths == sorted(worths[:13]) + worths[13:]


def test_what_is_never_used_again_is_worth_nothing() -> None:
    lives = [0.0] * AGES
    lives[8] = 10.0
    assert set(densities([0.0] * AGES, lives)) == {0.0}


def test_a_block_that_comes_back_after_it_has_left_is_known_as_used_before() -> None:
    learnt = HitDensity()
    learnt.enter(b"another")
    learnt.leave(b"block", learnt.enter(b"block"))
    assert learnt.enter(b"block").uses == 2


def test_as_many_are_remembered_as_the_blocks_held_allow() -> None:
    learnt = HitDensity()
    learnt.enter(b"the only one")
    for number in range(100):
        key = b"%08d" % number
        learnt.leave(key, learnt.enter(key))
    known = [learnt.enter(b"%08d" % number).uses - 1 for number in range(99, 0, -1)]
    assert known == [1] * GHOSTS + [0] * (99 - GHOSTS)


def test_endless_coming_and_going_takes_no_more_memory() -> None:
    learnt = HitDensity()

    def pass_through() -> None:
        for number in range(5000):
            key = b"%08d" % number
            learnt.leave(key, learnt.enter(key))

    pass_through()
    assert allocated_bytes(pass_through) < 20_000
