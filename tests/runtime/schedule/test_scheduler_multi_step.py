"""Replies that go on by themselves, while nobody else wants the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rekindle.engine.base import Engine, EngineOptions, Pending, Sampled
from rekindle.engine.llamacpp.engine import LlamaCppEngine
from rekindle.errors import EngineBroken
from rekindle.runtime.schedule.batch import Batcher, StepTiming
from rekindle.runtime.schedule.scheduler import MAX_MULTI_STEP_S
from tests.contract.actions import PROMPT
from tests.contract.engines import write_wide_llama
from tests.support.fake import FakeEngine
from tests.support.harness import Reply, RuntimeHarness

PROMPTS = [list(range(100 + 50 * number, 140 + 50 * number)) for number in range(3)]


@pytest.fixture(autouse=True)
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step takes any time, however busy the machine is."""
    monkeypatch.setattr("rekindle.runtime.schedule.batch.time.perf_counter", lambda: 0.0)


def harness_of(engine: Engine, **settings: Any) -> RuntimeHarness:
    return RuntimeHarness(engine, **{"is_undisturbed": lambda: True, **settings})


def start(harness: RuntimeHarness, **request: Any) -> list[Reply]:
    replies = [harness.submit(prompt, **request) for prompt in PROMPTS]
    while not all(reply.turn.generated_tokens for reply in replies):
        harness.scheduler.step()
    return replies


def expected(**request: Any) -> list[list[int]]:
    harness = RuntimeHarness(FakeEngine())
    replies = [harness.submit(prompt, **request) for prompt in PROMPTS]
    harness.run()
    return [reply.tokens for reply in replies]


@pytest.mark.parametrize("beside", [False, True])
def test_many_steps_are_one_call_and_the_replies_are_the_same(*, beside: bool) -> None:
    engine = FakeEngine(async_launch=beside)
    harness = harness_of(engine)
    replies = start(harness, max_tokens=60)
    calls = 0
    while not all(reply.ended for reply in replies):
        harness.scheduler.step()
        calls += 1
    assert calls < 30
    assert engine.counts.steps >= 60
    assert [reply.tokens for reply in replies] == expected(max_tokens=60)
    assert all(len(reply.text.split()) == 60 for reply in replies)
    assert harness.kv.counts.computed_tokens == engine.counts.computed_tokens


def test_it_stops_when_somebody_wants_the_engine() -> None:
    asked = iter([False] * 0)
    harness = harness_of(FakeEngine(), is_undisturbed=lambda: next(asked, False))
    [reply, *_] = start(harness, max_tokens=500)
    asked = iter([True, True, True, False])
    before = reply.turn.generated_tokens
    harness.scheduler.step()
    assert reply.turn.generated_tokens == before + 3


def test_it_stops_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = harness_of(FakeEngine())
    [reply, *_] = start(harness, max_tokens=2000)
    now_s = [0.0]

    def clock() -> float:
        now_s[0] += MAX_MULTI_STEP_S / 10
        return now_s[0]

    monkeypatch.setattr("rekindle.runtime.schedule.batch.time.perf_counter", clock)
    before = reply.turn.generated_tokens
    harness.scheduler.step()
    assert 2 <= reply.turn.generated_tokens - before <= 10


def test_a_turn_that_waits_for_a_place_does_not_end_it_and_one_that_can_start_does() -> None:
    harness = harness_of(FakeEngine(), parallel=3)
    replies = start(harness, max_tokens=500)
    harness.submit([7] * 50)
    before = replies[0].turn.generated_tokens
    harness.scheduler.step()
    assert replies[0].turn.generated_tokens > before + 1
    harness = harness_of(FakeEngine(), parallel=4)
    replies = start(harness, max_tokens=500)
    late = harness.submit([7] * 50)
    harness.run(late)
    assert all(not reply.ended for reply in replies)


@pytest.mark.parametrize("request_", [{"exact": True}, {"stop": ["nothing says this"]}])
def test_replies_that_something_else_may_end_go_step_by_step(request_: dict[str, Any]) -> None:
    harness = harness_of(FakeEngine())
    reply = harness.submit(PROMPTS[0], max_tokens=100, **request_)
    while not reply.turn.generated_tokens:
        harness.scheduler.step()
    before = reply.turn.generated_tokens
    harness.scheduler.step()
    assert reply.turn.generated_tokens == before + 1


def test_the_scheduler_learns_from_every_computed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from the steps of a multi-step decode before the one for which the pool is too full."""
    engine = FakeEngine(pool_tokens=256, context_tokens=256)
    harness = harness_of(engine, parallel=4)
    learned: list[int] = []
    computed: list[int] = []
    learn, collect = Batcher.learn, FakeEngine.collect

    def recorded_learn(batcher: Batcher, timing: StepTiming) -> None:
        learned.append(timing.steps)
        learn(batcher, timing)

    def counted_collect(engine: FakeEngine, pending: Pending) -> list[Sampled | None]:
        computed.append(1)
        return collect(engine, pending)

    monkeypatch.setattr(Batcher, "learn", recorded_learn)
    monkeypatch.setattr(FakeEngine, "collect", counted_collect)
    for number in range(100, 103):
        harness.submit([number, number], max_tokens=200)
    harness.run()
    assert harness.kv.counts.preemptions
    assert sum(learned) == len(computed)
    assert harness.kv.counts.computed_tokens == engine.counts.computed_tokens


def test_an_engine_that_breaks_meanwhile_changes_no_reply() -> None:
    engine = FakeEngine()
    harness = harness_of(engine)
    replies = start(harness, max_tokens=60)
    engine.break_steps = {engine.counts.steps + 7}
    harness.run()
    assert engine.counts.resets == 1
    assert [reply.tokens for reply in replies] == expected(max_tokens=60)
    assert harness.kv.counts.computed_tokens == engine.counts.computed_tokens


def test_a_pool_that_becomes_full_meanwhile_changes_no_reply() -> None:
    harness = harness_of(FakeEngine(pool_tokens=256, context_tokens=256))
    replies = [harness.submit([n, n], max_tokens=200) for n in range(100, 103)]
    harness.run()
    assert harness.kv.counts.preemptions > 0
    for number, reply in zip(range(100, 103), replies, strict=True):
        alone = RuntimeHarness(FakeEngine()).ask([number, number], max_tokens=200)
        assert reply.tokens == alone.tokens


def test_an_engine_that_fails_tells_everybody() -> None:
    engine = FakeEngine()
    harness = harness_of(engine)
    replies = start(harness, max_tokens=60)

    def broken(_work: object) -> None:
        engine.sequences.reset()
        raise EngineBroken("it is gone")

    engine.launch = broken  # type: ignore[method-assign, assignment]
    for _ in range(20):
        harness.scheduler.step()
    assert all(reply.ended for reply in replies)


def test_replies_of_several_kv_types_decode_together(tmp_path: Path) -> None:
    options = EngineOptions(
        path=write_wide_llama(tmp_path / "wide.gguf"), parallel=4, threads=1, context_tokens=1024
    )
    harness = harness_of(LlamaCppEngine(options))
    plain = harness.submit(PROMPT[:10], max_tokens=64, ignore_eos=True)
    quantised = harness.submit(PROMPT[5:15], max_tokens=64, ignore_eos=True, kv_bits=8)
    harness.run(plain, quantised)
    assert len(plain.tokens) == len(quantised.tokens) == 64
