"""The measured stages of a turn add up to the time of its first token."""

from __future__ import annotations

import pytest
from msgspec import structs

from rekindle.protocol.requests import Prepare
from rekindle.runtime.encode.request import Stopwatch
from tests.support.fake import FakeEngine
from tests.support.harness import RuntimeHarness


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("rekindle.runtime.encode.request.time", clock)
    return clock


def test_a_lap_adds_the_time_since_the_last_one_to_its_stage(clock: Clock) -> None:
    stopwatch = Stopwatch(received_s=90.0)
    stopwatch.lap("front")
    clock.now_s += 2
    stopwatch.lap("encode")
    clock.now_s += 3
    stopwatch.lap("queue")
    clock.now_s += 4
    stopwatch.lap("queue")
    assert structs.asdict(stopwatch.stages) == {
        "front": 10.0,
        "encode": 2.0,
        "queue": 7.0,
        "plan": 0.0,
        "restore": 0.0,
        "compute": 0.0,
    }


def test_no_time_is_counted_after_the_first_token(clock: Clock) -> None:
    stopwatch = Stopwatch()
    clock.now_s += 1
    stopwatch.lap("compute")
    clock.now_s += 5
    stopwatch.lap("queue")
    assert (stopwatch.stages.compute, stopwatch.stages.queue) == (1.0, 0.0)


def test_a_finished_turn_reports_its_stages() -> None:
    finished = RuntimeHarness(FakeEngine()).ask([1, 2, 3]).finished
    assert finished.stages is not None
    assert finished.stages.compute > 0
    assert finished.first_token_at_s is not None


def test_a_prepared_prompt_has_no_first_token() -> None:
    finished = RuntimeHarness(FakeEngine()).ask([1, 2, 3], prepare=Prepare()).finished
    assert finished.first_token_at_s is None
