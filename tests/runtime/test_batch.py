"""Slices of prompts: short enough to cancel between them, on any machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rekindle.engine.base import Sampled
from rekindle.protocol.events import Cancelled
from rekindle.runtime.batch import ALONE_S, SliceSize
from tests.support.fake import FakeEngine
from tests.support.harness import RuntimeHarness

MOST_TOKENS = 2048
PROMISED_S = 1.0  # a cancelled turn's sequence is free within this


class TimedEngine(FakeEngine):
    """Computes so many tokens a second, by a clock of its own."""

    def __init__(self, tokens_per_s: Callable[[int], float]) -> None:
        super().__init__(context_tokens=8192, pool_tokens=8192, batch_tokens=MOST_TOKENS + 4)
        self.tokens_per_s = tokens_per_s
        self.now_s = 0.0
        self.steps_s: list[float] = []
        self.rows: list[int] = []

    def step(self, work: Any) -> list[Sampled | None]:
        tokens = sum(len(item.tokens) for item in work)
        self.rows.append(tokens)
        self.steps_s.append(tokens / self.tokens_per_s(self.counts.computed_tokens))
        self.now_s += self.steps_s[-1]
        return super().step(work)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., TimedEngine]]:
    def runner(tokens_per_s: Callable[[int], float], prompt_tokens: int = 3000) -> TimedEngine:
        engine = TimedEngine(tokens_per_s)
        monkeypatch.setattr("rekindle.runtime.scheduler.time.perf_counter", lambda: engine.now_s)
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


def test_short_prompts_and_decode_steps_teach_nothing() -> None:
    """They take long a token, whatever the machine can do."""
    size = SliceSize(MOST_TOKENS)
    size.learn(256, 0.256)
    before = size.tokens(ALONE_S)
    for _ in range(20):
        size.learn(8, 0.1)
    assert size.tokens(ALONE_S) == before


def test_a_cancel_between_two_slices_ends_the_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = TimedEngine(lambda _computed: 50)
    monkeypatch.setattr("rekindle.runtime.scheduler.time.perf_counter", lambda: engine.now_s)
    harness = RuntimeHarness(engine)
    reply = harness.submit([100 + n % 800 for n in range(3000)])
    for _ in range(5):
        harness.scheduler.step()
    harness.cancel(reply)
    assert isinstance(reply.events[-1], Cancelled)
    assert engine.now_s <= 5 * PROMISED_S
    assert max(engine.rows) <= 50
