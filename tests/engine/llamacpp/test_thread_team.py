"""A thread team computes every part once and reports failures."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from rekindle.engine.llamacpp.thread_team import MIN_WORK, WAKING_WORK, ThreadTeam


@pytest.fixture
def team() -> Iterator[ThreadTeam]:
    made = ThreadTeam(3, "test")
    yield made
    made.close()


@pytest.mark.parametrize("item_work", [1, WAKING_WORK // 3, MIN_WORK])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 100])
def test_every_item_is_computed_once(team: ThreadTeam, count: int, item_work: int) -> None:
    done: list[int] = []
    team.share(lambda part: done.extend(range(part.start, part.stop)), count, item_work)
    assert sorted(done) == list(range(count))


def test_little_work_is_not_shared(team: ThreadTeam) -> None:
    threads: list[int] = []
    team.share(lambda _part: threads.append(threading.get_ident()), 10, MIN_WORK // 10)
    assert threads == [threading.get_ident()]


def test_parts_are_computed_at_the_same_time(team: ThreadTeam) -> None:
    together = threading.Barrier(3, timeout=20)
    team.share(lambda _part: (together.wait(), None)[1], 3, MIN_WORK)


@pytest.mark.parametrize("failing", [0, 2])
def test_a_failed_part_is_raised_after_the_others_have_ended(
    team: ThreadTeam, failing: int
) -> None:
    ended: list[int] = []

    def compute(part: slice) -> None:
        if part.start == failing:
            raise MemoryError
        ended.append(part.start)

    with pytest.raises(MemoryError):
        team.share(compute, 3, MIN_WORK)
    assert sorted({*ended, failing}) == [0, 1, 2]
    team.share(lambda part: ended.append(part.start), 3, MIN_WORK)  # the team still works
    assert len(ended) == 5
