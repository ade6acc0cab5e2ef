"""The console sees what the turns of a model do, and each tenant sees its own."""

from __future__ import annotations

import pytest

from rekindle.errors import BadRequest
from rekindle.protocol.events import (
    CacheReport,
    Cancelled,
    Delta,
    Failed,
    Finished,
    Prefill,
    Reason,
    Started,
    Status,
    TextDelta,
)
from rekindle.worker.activity import MAX_DAYS, MAX_ENDED_TURNS, Activity
from rekindle.worker.client import OpenTurns

A, B = b"a", b"b"
DAY_S = 86_400


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def report(reused: int, tier: str | None = "ram", status: Status = "hit") -> CacheReport:
    return CacheReport(
        status=status,
        reason=Reason.FULL_MATCH,
        reused_tokens=reused,
        cached_tokens=0,
        tier=tier,
    )


def finished(turn: int, prompt: int, reused: int, eval_s: float = 1.0) -> Finished:
    return Finished(turn, "stop", prompt, 5, eval_s, report(reused), completion_s=2.0)


class Watched:
    """The open turns of a model and what is known about them."""

    def __init__(self) -> None:
        self.clock, self.wall = Clock(), Clock()
        self.activity = Activity(self.clock, self.wall)
        self.turns = OpenTurns(10, self.activity)

    def begin(self, number: int, tenant: bytes = A) -> None:
        self.turns.add(number, tenant, lambda _event: None)

    def turn(self, number: int, prompt: int, reused: int, tenant: bytes = A) -> None:
        self.begin(number, tenant)
        self.turns.deliver(finished(number, prompt, reused))


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_a_turn_waits_reads_and_writes(watched: Watched) -> None:
    watched.begin(1)
    assert watched.activity.running(A)[0]["state"] == "waiting"
    watched.turns.deliver(Started(1, 100, 40, report(40)))
    watched.turns.deliver(Prefill(1, 70, 100))
    [shown] = watched.activity.running(A)
    assert (shown["state"], shown["read_tokens"], shown["reused_tokens"]) == ("prefill", 70, 40)
    assert shown["tier"] == "ram"
    for _ in range(10):
        watched.turns.deliver(Delta(1, TextDelta("x")))
    watched.clock.now_s += 2
    [shown] = watched.activity.running(A)
    assert (shown["state"], shown["output_tokens"]) == ("decode", 10)
    assert shown["tokens_per_s"] == 5.0
    watched.turns.deliver(finished(1, 100, 40))
    assert watched.activity.running(A) == []


def test_a_tenant_sees_its_own_turns_and_an_admin_sees_all(watched: Watched) -> None:
    watched.turn(1, 100, 0, A)
    watched.turn(2, 100, 0, B)
    watched.begin(3, B)
    assert len(watched.activity.ended(A, 10)) == 1
    assert watched.activity.running(A) == []
    assert len(watched.activity.ended(None, 10)) == 2
    assert len(watched.activity.running(None)) == 1
    assert watched.activity.tally(b"nobody").saved_tokens == 0


def test_every_way_to_end_a_turn_is_shown(watched: Watched) -> None:
    for number in range(1, 4):
        watched.begin(number)
    watched.turns.deliver(Failed(1, BadRequest("no").info))
    watched.turns.deliver(Cancelled(2))
    watched.turns.abandon(3)
    ends = [turn["end"] for turn in watched.activity.ended(A, 10)]
    assert ends == ["cancelled", "cancelled", "failed"]


def test_an_abandoned_turn_ends_once(watched: Watched) -> None:
    watched.begin(1)
    watched.turns.abandon(1)
    watched.turns.deliver(Cancelled(1))
    assert len(watched.activity.ended(A, 10)) == 1


def test_saved_time_is_estimated_from_the_measured_prefill_speed(watched: Watched) -> None:
    watched.turn(1, 100, 0)  # 100 tokens in one second
    watched.turn(2, 300, 200)  # computing 200 more would have taken two seconds
    tally = watched.activity.tally(A)
    assert tally.saved_tokens == 200
    assert tally.saved_s == pytest.approx(2.0, rel=0.01)


def test_a_prompt_of_a_few_tokens_says_nothing_about_speed(watched: Watched) -> None:
    watched.turn(1, 10, 0)
    assert watched.activity.token_s is None


def test_figures_are_kept_by_minute_and_by_day(watched: Watched) -> None:
    watched.turn(1, 100, 60)
    watched.wall.now_s += 60
    watched.turn(2, 50, 10)
    tally = watched.activity.tally(None)
    assert [minute[1:] for minute in tally.minutes] == [[100, 60, 5], [50, 10, 5]]
    assert len(tally.days) == 1
    for number in range(MAX_DAYS + 5):
        watched.wall.now_s += DAY_S
        watched.turn(10 + number, 50, 10)
    assert len(tally.days) == MAX_DAYS


def test_the_memory_for_ended_turns_and_tenants_is_bounded(watched: Watched) -> None:
    for number in range(MAX_ENDED_TURNS + 50):
        watched.turn(number, 100, 0, b"%d" % number)
    assert len(watched.activity.ended(None, 10**6)) == MAX_ENDED_TURNS
