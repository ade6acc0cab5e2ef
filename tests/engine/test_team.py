"""Threads that share one computation."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from rekindle.engine.team import LEAST_WORK, WAKING_WORK, Team


@pytest.fixture
def team() -> Iterator[Team]:
    made = Team(3, "test")
    yield made
    made.close()


@pytest.mark.parametrize("item_work", [1, WAKING_WORK // 3, LEAST_WORK])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 100])
def test_every_item_is_computed_once(team: Team, count: int, item_work: int) -> None:
    done: list[int] = []
    team.share(lambda part: done.extend(range(part.start, part.stop)), count, item_work)
    assert sorted(done) == list(range(count))


def test_little_work_is_not_shared(team: Team) -> None:
    threads: list[int] = []
    team.share(lambda _part: threads.append(threading.get_ident()), 10, LEAST_WORK // 10)
    assert threads == [threading.get_ident()]


def test_parts_are_computed_at_the_same_time(team: Team) -> None:
    together = threading.Barrier(3, timeout=20)
    team.share(lambda _part: (together.wait(), None)[1], 3, LEAST_WORK)


@pytest.mark.parametrize("failing", [0, 2])
def test_a_part_that_fails_is_told_when_the_others_have_ended(team: Team, failing: int) -> None:
    ended: list[int] = []

    def compute(part: slice) -> None:
        if part.start == failing:
            raise MemoryError
        ended.append(part.start)

    with pytest.raises(MemoryError):
        team.share(compute, 3, LEAST_WORK)
    assert sorted({*ended, failing}) == [0, 1, 2]
    team.share(lambda part: ended.append(part.start), 3, LEAST_WORK)  # goes on
    assert len(ended) == 5
