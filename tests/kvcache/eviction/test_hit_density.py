from __future__ import annotations

import json

import pytest

from rekindle.kvcache.eviction.hit_density import (
    AGES,
    CLASSES,
    EDGES,
    EXTENDED,
    MAX_USES,
    RANK_TICKS,
    HitDensity,
    age_bin,
    hit_densities,
    reuse_probabilities,
)
from tests.kvcache.measure import allocated_bytes


def look(estimator: HitDensity) -> None:
    """Have the ranking updated, by uses of a block in another class."""
    place = estimator.add(b"another"), estimator.tick
    for _ in range(RANK_TICKS):
        place = estimator.use(*place), estimator.tick


def test_an_age_is_in_the_bin_whose_edges_are_around_it() -> None:
    for ticks in (1, 2, 3, 10, 1000, 10**6, 10**9):
        assert EDGES[age_bin(ticks)] <= ticks < EDGES[age_bin(ticks) + 1]
    assert age_bin(0) == 0
    assert age_bin(10**30) == AGES - 1


def test_a_block_that_is_reused_soon_has_a_higher_density() -> None:
    soon, late = [0.0] * AGES, [0.0] * AGES
    soon[3], late[12] = 10.0, 10.0
    assert hit_densities(soon, soon)[0] > hit_densities(late, late)[0]


def test_the_density_looks_ahead_to_the_age_at_which_hits_come() -> None:
    """A block that has nearly reached that age is worth more than one that was just used."""
    hits = [0.0] * AGES
    hits[12] = 10.0
    worths = hit_densities(hits, hits)
    assert worths == sorted(worths[:13]) + worths[13:]


def test_a_block_that_is_never_reused_has_no_density() -> None:
    lives = [0.0] * AGES
    lives[8] = 10.0
    assert set(hit_densities([0.0] * AGES, lives)) == {0.0}


def test_the_reuse_probability_is_the_share_of_later_lives_that_end_in_a_hit() -> None:
    hits, lives = [0.0] * AGES, [0.0] * AGES
    hits[3], lives[3] = 300.0, 400.0
    lives[9] = 200.0
    assert reuse_probabilities(hits, lives)[0] == reuse_probabilities(hits, lives)[3] == 0.5
    assert reuse_probabilities(hits, lives)[4] == 1.0, "too few lives to say"


def test_an_evicted_block_that_comes_back_counts_as_used_before() -> None:
    estimator = HitDensity()
    estimator.remove(b"block", estimator.add(b"block"), estimator.tick)
    assert estimator.add(b"block") == 1
    assert estimator.add(b"another") == 0


def test_a_class_is_the_number_of_uses_and_whether_a_block_followed() -> None:
    estimator = HitDensity()
    class_ = estimator.add(b"block")
    for uses in (2, 3, 4, 5, 6):
        class_ = estimator.use(class_, estimator.tick)
        assert class_ == min(uses, MAX_USES) - 1
    for _ in range(2):
        class_ = estimator.extend(class_, estimator.tick)
        assert class_ == MAX_USES - 1 + EXTENDED
    assert estimator.use(class_, estimator.tick) == class_


def test_evicted_blocks_that_do_not_come_back_lower_the_density_of_their_class() -> None:
    """Otherwise a block that is reused late would seem to be reused always."""
    sure, doubtful = HitDensity(), HitDensity()
    for estimator, passing in ((sure, 1), (doubtful, 1000)):
        for number in range(passing):
            estimator.remove(b"%08d" % number, estimator.add(b"%08d" % number), estimator.tick)
        estimator.add(b"%08d" % 0)
        look(estimator)
    assert max(doubtful.densities[0]) < max(sure.densities[0])


def test_blocks_that_are_held_in_vain_lower_the_density_of_their_class() -> None:
    sure, doubtful = HitDensity(), HitDensity()
    for estimator, kept in ((sure, 0), (doubtful, 500)):
        estimator.use(estimator.add(b"used"), estimator.tick)
        for number in range(kept):
            estimator.add(b"%08d" % number)
        look(estimator)
    assert max(doubtful.densities[0]) < max(sure.densities[0])


def test_every_life_ends_when_no_block_is_held_or_remembered() -> None:
    estimator = HitDensity()
    places = [(estimator.add(b"%08d" % number), estimator.tick) for number in range(3000)]
    places = [(estimator.extend(*place), place[1]) for place in places]
    places = [(estimator.use(*place), estimator.tick) for place in places]
    assert estimator._open.total() == 3000
    for place in places:
        estimator.remove(None, *place)
    assert estimator._open.total() == 0


def test_a_dump_can_be_loaded() -> None:
    estimator, other = HitDensity(), HitDensity()
    for number in range(5000):
        key = b"%08d" % (number * number % 977)
        estimator.remove(key, estimator.add(key), estimator.tick)
    other.load(json.loads(json.dumps(estimator.dump())))
    again = HitDensity()
    again.load(other.dump())
    assert other.densities == again.densities
    assert max(max(row) for row in other.densities) > 0


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
def test_invalid_counts_are_refused_and_change_nothing(counts: object) -> None:
    estimator = HitDensity()
    before = estimator.dump()
    with pytest.raises(ValueError, match=r"."):
        estimator.load(counts)
    assert estimator.dump() == before


def test_endless_insertion_and_eviction_takes_no_more_memory() -> None:
    estimator = HitDensity()

    def pass_through() -> None:
        for number in range(5000):
            key = b"%08d" % number
            estimator.remove(key, estimator.add(key), estimator.tick)

    pass_through()
    assert allocated_bytes(pass_through) < 20_000
