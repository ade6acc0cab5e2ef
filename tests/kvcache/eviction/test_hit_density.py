from __future__ import annotations

import json

import pytest

from rekindle.kvcache.eviction.hit_density import (
    AGES,
    CLASSES,
    EDGES,
    EXTENDED,
    MOST_USES,
    RANK_TICKS,
    HitDensity,
    age_bin,
    chances,
    densities,
)
from tests.kvcache.measure import allocated_bytes


def look(learnt: HitDensity) -> None:
    """Let it have the next look at its counts, with uses of a class of their own."""
    place = learnt.enter(b"another"), learnt.tick
    for _ in range(RANK_TICKS):
        place = learnt.use(*place), learnt.tick


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


def test_the_chance_of_a_use_is_the_share_of_lives_that_end_in_one_later() -> None:
    hits, lives = [0.0] * AGES, [0.0] * AGES
    hits[3], lives[3] = 300.0, 400.0
    lives[9] = 200.0
    assert chances(hits, lives)[0] == chances(hits, lives)[3] == 0.5
    assert chances(hits, lives)[4] == 1.0, "too few lives to say"


def test_a_block_that_comes_back_after_it_has_left_is_known_as_used_before() -> None:
    learnt = HitDensity()
    learnt.leave(b"block", learnt.enter(b"block"), learnt.tick)
    assert learnt.enter(b"block") == 1
    assert learnt.enter(b"another") == 0


def test_a_class_is_the_number_of_uses_and_whether_anything_followed() -> None:
    learnt = HitDensity()
    class_ = learnt.enter(b"block")
    for uses in (2, 3, 4, 5, 6):
        class_ = learnt.use(class_, learnt.tick)
        assert class_ == min(uses, MOST_USES) - 1
    for _ in range(2):
        class_ = learnt.extend(class_, learnt.tick)
        assert class_ == MOST_USES - 1 + EXTENDED
    assert learnt.use(class_, learnt.tick) == class_


def test_what_has_left_and_is_not_back_counts_against_those_like_it() -> None:
    """Else what is used again late would seem to be used again always."""
    sure, doubtful = HitDensity(), HitDensity()
    for learnt, passing in ((sure, 1), (doubtful, 1000)):
        for number in range(passing):
            learnt.leave(b"%08d" % number, learnt.enter(b"%08d" % number), learnt.tick)
        learnt.enter(b"%08d" % 0)
        look(learnt)
    assert max(doubtful.worths[0]) < max(sure.worths[0])


def test_what_is_held_and_not_used_counts_against_those_like_it() -> None:
    """Else whatever is kept for nothing would never be known as that."""
    sure, doubtful = HitDensity(), HitDensity()
    for learnt, kept in ((sure, 0), (doubtful, 500)):
        learnt.use(learnt.enter(b"used"), learnt.tick)
        for number in range(kept):
            learnt.enter(b"%08d" % number)
        look(learnt)
    assert max(doubtful.worths[0]) < max(sure.worths[0])


def test_no_life_is_left_open_when_nothing_is_held_or_remembered() -> None:
    learnt = HitDensity()
    places = [(learnt.enter(b"%08d" % number), learnt.tick) for number in range(3000)]
    places = [(learnt.extend(*place), place[1]) for place in places]
    places = [(learnt.use(*place), learnt.tick) for place in places]
    assert learnt.open_lives == 3000
    for place in places:
        learnt.leave(None, *place)
    assert learnt.open_lives == 0


def test_what_was_learnt_is_the_same_after_it_was_dumped_and_loaded() -> None:
    learnt, other = HitDensity(), HitDensity()
    for number in range(5000):
        key = b"%08d" % (number * number % 977)
        learnt.leave(key, learnt.enter(key), learnt.tick)
    other.load(json.loads(json.dumps(learnt.dump())))
    again = HitDensity()
    again.load(other.dump())
    assert other.worths == again.worths
    assert max(max(row) for row in other.worths) > 0


@pytest.mark.parametrize(
    "counts",
    [
        None,
        [],
        [[0.0] * AGES] * 2,
        [[[0.0] * AGES] * CLASSES] * 3,
        [[[float("nan")] * AGES] * CLASSES] * 2,
        [[[-1.0] * AGES] * CLASSES] * 2,
        [[[2.0] * AGES] * CLASSES, [[1.0] * AGES] * CLASSES],
        [[["much"] * AGES] * CLASSES] * 2,
        {"hits": 1},
    ],
)
def test_what_are_no_counts_is_refused_and_changes_nothing(counts: object) -> None:
    learnt = HitDensity()
    before = learnt.dump()
    with pytest.raises(ValueError, match=r"."):
        learnt.load(counts)
    assert learnt.dump() == before


def test_endless_coming_and_going_takes_no_more_memory() -> None:
    learnt = HitDensity()

    def pass_through() -> None:
        for number in range(5000):
            key = b"%08d" % number
            learnt.leave(key, learnt.enter(key), learnt.tick)

    pass_through()
    assert allocated_bytes(pass_through) < 20_000
