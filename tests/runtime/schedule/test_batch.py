"""Slices of prompts: short enough to cancel between them, on any machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rekindle.protocol.events import Cancelled
from rekindle.runtime.schedule.batch import (
    ALONE_S,
    SHARED_S,
    ChunkSize,
)
from tests.support.fake import FakeEngine, FakePending
from tests.support.harness import RuntimeHarness

MOST_TOKENS = 2048
PROMISED_S = 1.0  # a cancelled turn's sequence is free within this


class TimedEngine(FakeEngine):
    """Computes so many tokens a second, by a clock of its own; a step takes some time besides."""

    def __init__(
        self,
        tokens_per_s: Callable[[int], float],
        overhead_s: Callable[[int], float] = lambda _computed: 0.0,
    ) -> None:
        super().__init__(context_tokens=8192, pool_tokens=8192, batch_tokens=MOST_TOKENS + 4)
        self.tokens_per_s = tokens_per_s
        self.overhead_s = overhead_s
        self.now_s = 0.0
        self.steps_s: list[float] = []
        self.rows: list[int] = []

    def launch(self, work: Any) -> FakePending:
        tokens = sum(len(item.tokens) for item in work)
        self.rows.append(tokens)
        computed = self.counts.computed_tokens
        self.steps_s.append(self.overhead_s(computed) + tokens / self.tokens_per_s(computed))
        self.now_s += self.steps_s[-1]
        return super().launch(work)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., TimedEngine]]:
    def runner(*speeds: Callable[[int], float], prompt_tokens: int = 3000) -> TimedEngine:
        engine = TimedEngine(*speeds)
        monkeypatch.setattr(
            "rekindle.runtime.schedule.batch.time.perf_counter", lambda: engine.now_s
        )
        prompt = [100 + n % 800 for n in range(prompt_tokens)]
        RuntimeHarness(engine).ask(prompt, max_tokens=1)
        return engine

    yield runner
    monkeypatch.undo()


@pytest.mark.parametrize("speed", [8, 20, 50, 100, 300, 2_000, 100_000])
def test_a_lone_prompt_never_holds_a_cancel_for_its_second(
    run: Callable[..., TimedEngine], speed: int
) -> None:
    """The first slice too, of which nobody knows how long it will take: hence it is small, and
    a machine so slow that even that takes longer is beyond help."""
    engine = run(lambda _computed: speed)
    first_s, *others_s = engine.steps_s
    assert max(others_s) <= max(ALONE_S, 4 / speed)
    assert max(others_s) < PROMISED_S
    assert first_s < PROMISED_S or speed < 20


def test_a_fast_machine_takes_large_slices_from_the_second_on(
    run: Callable[..., TimedEngine],
) -> None:
    engine = run(lambda _computed: 100_000, prompt_tokens=8000)
    assert len(engine.rows) <= 1 + 4 + 1
    assert max(engine.rows) > 1000


def test_a_machine_that_slows_down_is_believed_at_once(run: Callable[..., TimedEngine]) -> None:
    """As it does when the context grows or another program wants its cores."""
    engine = run(lambda computed: 1_000 if computed < 1_000 else 100)
    too_long = [took_s for took_s in engine.steps_s if took_s > ALONE_S]
    assert len(too_long) <= 1


def test_a_slow_moment_is_soon_forgotten(run: Callable[..., TimedEngine]) -> None:
    """The first steps read the weights from disk."""
    engine = run(lambda computed: 10 if computed < 30 else 1_000)
    assert max(engine.rows[:20]) > 256


@pytest.mark.parametrize(
    ("overhead_s", "speed"), [(0.1, 200), (0.4, 200), (0.4, 2_000), (1.0, 100), (3.0, 50)]
)
def test_slices_do_not_shrink_to_nothing_where_a_step_itself_takes_long(
    run: Callable[..., TimedEngine], overhead_s: float, speed: int
) -> None:
    """Large models read all their weights in every step, however few rows it has; and threads
    wait for each other on a busy machine."""
    engine = run(lambda _computed: speed, lambda _computed: overhead_s)
    assert sum(engine.steps_s) < 3 * sum(engine.rows) / speed + 20 * overhead_s
    assert max(engine.steps_s) <= max(ALONE_S, 2 * overhead_s) + 0.1


def test_slices_recover_from_a_time_in_which_steps_took_long(
    run: Callable[..., TimedEngine],
) -> None:
    engine = run(
        lambda _computed: 1_000, lambda computed: 0.6 if 100 < computed < 900 else 0.0,
        prompt_tokens=6000,
    )  # fmt: skip
    assert max(engine.rows[-4:]) >= 256
    assert max(engine.steps_s[-4:]) <= ALONE_S


def test_one_odd_moment_does_not_make_a_slice_that_holds_a_cancel_for_long() -> None:
    """Twice the rows in the same time look as if rows cost nothing."""
    size = ChunkSize(MOST_TOKENS)
    size.learn(16, 0.2)
    size.learn(32, 0.201)
    assert size.tokens(ALONE_S) / (16 / 0.2) <= PROMISED_S


@pytest.mark.parametrize(("speed", "most"), [(1_000, 250), (100, 64), (30, 27)])
def test_beside_replies_slices_are_small_but_not_slow(speed: int, most: int) -> None:
    """Much smaller ones would take half as long again for each token."""
    size = ChunkSize(MOST_TOKENS)
    for rows in (16, 32, 64, 128):
        size.learn(rows, rows / speed)
    assert 0.9 * most <= size.tokens(SHARED_S) <= most


def test_short_prompts_and_decode_steps_teach_nothing() -> None:
    """They take long a token, whatever the machine can do."""
    size = ChunkSize(MOST_TOKENS)
    size.learn(256, 0.256)
    before = size.tokens(ALONE_S)
    for _ in range(20):
        size.learn(8, 0.1)
    assert size.tokens(ALONE_S) == before


def test_the_end_of_a_long_conversation_does_not_make_the_next_prompt_slow() -> None:
    """Its few rows take as long as thousands in slices: llama.cpp's attention takes row after row
    below 64 of them. Slices that became as small as such a step says would never be faster."""
    size = ChunkSize(MOST_TOKENS)
    for rows in (16, 32, 64, 128, 256):
        size.learn(rows, rows / 1_000)
    before = size.tokens(ALONE_S)
    size.learn(34, 1.25)
    size.learn(63, 1.8)
    assert size.tokens(ALONE_S) == before


def attention_s(rows: int) -> float:
    """What llama.cpp takes on a CPU after a long context: below 64 rows, row after row."""
    return rows * (0.02 if rows < 64 else 0.001)


def test_slices_that_a_busy_moment_made_small_become_large_again() -> None:
    size = ChunkSize(MOST_TOKENS)
    for rows in (64, 128, 256):
        size.learn(rows, attention_s(rows))
    size.learn(256, 6.0)
    assert size.tokens(ALONE_S) < 64
    for _ in range(12):
        rows = size.tokens(ALONE_S)
        size.learn(rows, attention_s(rows))
    assert size.tokens(ALONE_S) >= 256


def test_whole_slices_are_seldom_tried_where_they_take_too_long() -> None:
    size, tried = ChunkSize(MOST_TOKENS), 0
    size.learn(64, 0.1)
    for _ in range(200):
        rows = size.tokens(ALONE_S)
        tried += rows >= 64
        size.learn(rows, rows / 40)
    assert tried <= 5


def test_a_cancel_between_two_slices_ends_the_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = TimedEngine(lambda _computed: 50)
    monkeypatch.setattr("rekindle.runtime.schedule.batch.time.perf_counter", lambda: engine.now_s)
    harness = RuntimeHarness(engine)
    reply = harness.submit([100 + n % 800 for n in range(3000)])
    for _ in range(5):
        harness.scheduler.step()
    harness.cancel(reply)
    assert isinstance(reply.events[-1], Cancelled)
    assert engine.now_s <= 5 * PROMISED_S
    assert max(engine.rows) <= 50


# -- beside replies on a GPU -------------------------------------------------------------------


class TimedGpu(FakeEngine):
    """A step takes 8 ms, and each of its rows 0.1 ms."""

    now_s, row_s = 0.0, 1e-4

    def __init__(self) -> None:
        super().__init__(
            device="gpu", context_tokens=8192, pool_tokens=65_536, batch_tokens=MOST_TOKENS + 16
        )
        self.prompt_rows: list[int] = []

    def launch(self, work: Any) -> FakePending:
        rows = sum(len(item.tokens) for item in work)
        self.prompt_rows.append(rows - sum(len(item.tokens) == 1 for item in work))
        self.now_s += 8e-3 + rows * self.row_s
        return super().launch(work)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[TimedGpu, RuntimeHarness]]:
    """Beside four replies that go on for long."""
    engine = TimedGpu()
    monkeypatch.setattr("rekindle.runtime.schedule.batch.time.perf_counter", lambda: engine.now_s)
    harness = RuntimeHarness(engine, parallel=8)
    for number in range(4):
        harness.submit([50 + number] * 20, max_tokens=6000)
    for _ in range(60):
        harness.scheduler.step()
    yield engine, harness
    monkeypatch.undo()


def words(count: int, start: int) -> list[int]:
    return [100 + (start + n * 7) % 800 for n in range(count)]


def test_replies_beside_a_long_prompt_have_most_of_the_time(
    gpu: tuple[TimedGpu, RuntimeHarness],
) -> None:
    engine, harness = gpu
    began_s, steps = engine.now_s, len(engine.prompt_rows)
    late = harness.submit(words(6000, 1), max_tokens=1)
    harness.run(late)
    took_s = (engine.now_s - began_s) / (len(engine.prompt_rows) - steps)
    assert 1.3 < took_s / 8.4e-3 <= 1.6  # the burst at the beginning included


def test_a_short_prompt_does_not_wait_for_the_slices_of_a_long_one(
    gpu: tuple[TimedGpu, RuntimeHarness],
) -> None:
    engine, harness = gpu
    late = harness.submit(words(6000, 1), max_tokens=1)
    while late.turn.held_tokens < 2000:
        harness.scheduler.step()
    began_s = engine.now_s
    short = harness.submit(words(40, 5), max_tokens=1)
    harness.run(short)
    assert engine.now_s - began_s < 0.3
    assert not late.ended


def test_many_prompts_at_once_are_not_held_up_by_a_few_replies(
    gpu: tuple[TimedGpu, RuntimeHarness],
) -> None:
    engine, harness = gpu
    began_s = engine.now_s
    asked = [harness.submit(words(300, number), max_tokens=1) for number in range(20)]
    harness.run(*asked)
    assert engine.now_s - began_s < 3 * 20 * 300 * 1e-4


def test_a_step_beside_a_reply_that_is_over_is_no_larger_than_a_batch() -> None:
    engine = FakeEngine(device="gpu", async_launch=True)  # which checks that
    harness = RuntimeHarness(engine)
    over = harness.submit([1] * 20, max_tokens=12)
    while not over.turn.is_over:
        harness.scheduler.step()
    late = harness.submit([100 + number for number in range(400)], max_tokens=2)
    harness.run(late)
    assert late.ended


def test_a_first_slice_beside_replies_is_no_larger_than_the_machine_is_fast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = TimedGpu()
    engine.row_s = 1 / 120
    monkeypatch.setattr("rekindle.runtime.schedule.batch.time.perf_counter", lambda: engine.now_s)
    harness = RuntimeHarness(engine)
    harness.submit(words(300, 1), max_tokens=2000)
    for _ in range(60):
        harness.scheduler.step()
    before = len(engine.prompt_rows)
    late = harness.submit(words(2000, 3), max_tokens=1)
    harness.run(late)
    assert max(engine.prompt_rows[before:]) <= 100
    assert engine.now_s < 120
