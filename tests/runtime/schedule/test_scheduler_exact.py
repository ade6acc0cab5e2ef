"""Exact turns take memory of their own: as many run as there is room for, and one that gets none
fails alone."""

from __future__ import annotations

from rekindle.protocol.events import Failed, Finished
from tests.support.fake import FakeEngine
from tests.support.harness import RuntimeHarness

PROMPT = list(range(100, 160))


def test_an_exact_turn_without_memory_fails_alone_and_says_what_to_do() -> None:
    engine = FakeEngine(exact_contexts=0)
    harness = RuntimeHarness(engine)
    bystander = harness.submit(PROMPT, max_tokens=20)
    harness.scheduler.step()
    refused = harness.submit([7, *PROMPT], exact=True)
    harness.run()
    assert isinstance(bystander.events[-1], Finished)
    assert bystander.tokens == RuntimeHarness(FakeEngine()).ask(PROMPT, max_tokens=20).tokens
    [failed] = refused.events
    assert isinstance(failed, Failed)
    assert (failed.error.status, failed.error.code) == (503, "no_memory")
    assert "cache_exact" in failed.error.message
    assert engine.counts.resets == 0
    assert harness.scheduler.turns == 0


def test_an_exact_turn_that_failed_for_memory_works_when_there_is_some() -> None:
    engine = FakeEngine(exact_contexts=0)
    harness = RuntimeHarness(engine)
    assert isinstance(harness.ask(PROMPT, exact=True).events[-1], Failed)
    engine.exact_contexts = None
    reply = harness.ask(PROMPT, exact=True)
    assert reply.tokens == RuntimeHarness(FakeEngine()).ask(PROMPT, exact=True).tokens


def test_exact_turns_wait_for_each_other_where_few_can_run_and_others_pass() -> None:
    engine = FakeEngine(exact_sequences=1)
    harness = RuntimeHarness(engine)
    exact = [harness.submit([n, *PROMPT], exact=True, max_tokens=30) for n in range(3)]
    shared = harness.submit([9, *PROMPT], max_tokens=3)
    harness.run(shared)
    assert [reply.started for reply in exact] == [True, False, False]
    harness.run()
    assert all(isinstance(reply.events[-1], Finished) for reply in exact)


def test_idle_sequences_leave_one_for_every_turn_that_may_run() -> None:
    """However few of them may be exact."""
    engine = FakeEngine(exact_sequences=1, max_sequences=6)
    harness = RuntimeHarness(engine, parallel=4)
    for number in range(6):
        harness.ask([number, *PROMPT], max_tokens=1)
    replies = [harness.submit([10 + n, *PROMPT], max_tokens=3) for n in range(4)]
    harness.run()
    assert all(isinstance(reply.events[-1], Finished) for reply in replies)


def test_the_engine_is_told_to_give_idle_memory_back_with_every_tick() -> None:
    engine = FakeEngine()
    harness = RuntimeHarness(engine)
    for _ in harness.runtime.upkeep():
        pass
    assert engine.counts.releases == 1
