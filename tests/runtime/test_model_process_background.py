"""Background work stays within its time budget between two steps."""

from __future__ import annotations

from rekindle.runtime.model_process import Background, Pieces

BUDGET_S = 0.002  # the default
PIECE_S = BUDGET_S / 4


class Clock:
    """Only pieces of work make time pass."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.done: list[str] = []

    def __call__(self) -> float:
        return self.now_s

    def work(self, name: str, pieces: int) -> Pieces[None]:
        for number in range(pieces):
            self.now_s += PIECE_S
            self.done.append(f"{name}{number}")
            yield


def test_work_stops_when_the_budget_is_spent_and_resumes_in_the_next_run() -> None:
    clock = Clock()
    background = Background(clock)
    background.add(clock.work("a", 10))
    assert background.run()
    assert clock.done == ["a0", "a1", "a2", "a3"]
    assert background.run()
    assert not background.run()
    assert clock.done == [f"a{number}" for number in range(10)]


def test_works_take_turns_so_that_a_short_one_does_not_wait_for_a_long_one() -> None:
    clock = Clock()
    background = Background(clock)
    background.add(clock.work("long", 100))
    background.add(clock.work("b", 1))
    background.run()
    assert clock.done == ["long0", "b0", "long1", "long2"]


def test_many_short_works_stay_within_the_budget() -> None:
    clock = Clock()
    background = Background(clock)
    for number in range(1000):
        background.add(clock.work(str(number), 1))
    assert background.run()
    assert len(clock.done) == 4


def test_without_work_run_returns_false() -> None:
    assert not Background().run()
