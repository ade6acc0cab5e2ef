"""Who goes next, and that every turn ends exactly once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.engine.base import EngineOptions, Pending, Sampled
from rekindle.errors import EngineBroken, ServerError
from rekindle.protocol.events import Cancelled, Event, Failed, Finished, Prefill
from rekindle.protocol.requests import SamplingParams
from tests.support.fake import FakeEngine, FakeSequences, NumberTokenizer
from tests.support.harness import RuntimeHarness
from tests.support.numpy_engine import SUFFIX
from tests.support.numpy_engine.engine import NumpyEngine
from tests.support.numpy_engine.model import write_numpy
from tests.support.rounds import rounds

PROMPT = list(range(100, 160))


def cold(tokens: list[int], *, can_truncate: bool = True, **ask: object) -> list[int]:
    return RuntimeHarness(FakeEngine(can_truncate=can_truncate)).ask(tokens, **ask).tokens


def ending_with(token: int) -> FakeEngine:
    """An engine whose model ends its turns with this token."""
    engine, tokenizer = FakeEngine(), NumberTokenizer()
    tokenizer.end_tokens = frozenset({token})
    engine.tokenizer = tokenizer
    return engine


def test_a_turn_ends_in_exactly_one_terminal_event() -> None:
    harness = RuntimeHarness(FakeEngine())
    reply = harness.ask(PROMPT, max_tokens=5)
    harness.offload()
    assert [type(event) for event in reply.events].count(Finished) == 1
    assert len(reply.tokens) == 5
    assert reply.finished.reason == "length"


def test_the_end_token_ends_a_turn_and_is_not_text() -> None:
    said = cold(PROMPT, max_tokens=6)
    harness = RuntimeHarness(ending_with(said[3]))
    reply = harness.ask(PROMPT, max_tokens=6)
    assert reply.tokens == said[:3]
    assert reply.finished.reason == "stop"


def test_ignoring_the_end_goes_on_to_the_limit() -> None:
    said = cold(PROMPT, max_tokens=6)
    harness = RuntimeHarness(ending_with(said[3]))
    assert harness.ask(PROMPT, max_tokens=6, ignore_eos=True).tokens == said


def test_a_stop_string_ends_a_turn_and_never_leaks() -> None:
    said = cold(PROMPT, max_tokens=6)
    harness = RuntimeHarness(FakeEngine())
    reply = harness.ask(PROMPT, max_tokens=6, stop=[f"{said[2]} {said[3]}"])
    assert reply.text == f"{said[0]} {said[1]} "
    assert reply.finished.reason == "stop"


def test_a_reply_ends_where_the_context_ends() -> None:
    engine = FakeEngine(context_tokens=64)
    reply = RuntimeHarness(engine).ask(PROMPT, max_tokens=None)
    assert len(reply.tokens) == 64 - len(PROMPT)
    assert reply.finished.reason == "length"


def test_many_turns_are_batched_in_one_step() -> None:
    engine = FakeEngine()
    harness = RuntimeHarness(engine, parallel=4)
    replies = [harness.submit([n, n + 1, n + 2], max_tokens=20) for n in range(100, 500, 100)]
    harness.run()
    assert engine.counts.steps < 30
    assert [reply.tokens for reply in replies] == [
        cold(list(reply.turn.encoded.prompt.tokens), max_tokens=20) for reply in replies
    ]


def test_more_turns_than_sequences_all_finish() -> None:
    harness = RuntimeHarness(FakeEngine(), parallel=2)
    replies = [harness.submit([n] * 20, max_tokens=4) for n in range(100, 130)]
    harness.run()
    assert all(isinstance(reply.events[-1], Finished) for reply in replies)


def test_a_long_prompt_does_not_keep_a_short_one_waiting() -> None:
    harness = RuntimeHarness(FakeEngine(context_tokens=4096, pool_tokens=8192))
    long = harness.submit(list(range(100, 3900)), max_tokens=1)
    short = harness.submit([1, 2, 3], max_tokens=1)
    harness.run(short)
    assert not long.ended
    harness.run(long)


def test_replies_go_on_while_a_long_prompt_is_read() -> None:
    harness = RuntimeHarness(FakeEngine(context_tokens=4096, pool_tokens=8192))
    talker = harness.submit([1, 2, 3], max_tokens=30)
    harness.scheduler.step()
    long = harness.submit(list(range(100, 3900)), max_tokens=1)
    harness.run(talker)
    assert not long.ended
    harness.run(long)


def test_turns_with_a_common_prefix_compute_it_once_even_when_they_come_together() -> None:
    engine = FakeEngine()
    harness = RuntimeHarness(engine, parallel=10, idle_tokens=0)
    document = list(range(200, 360))
    replies = [harness.submit([*document, 500 + n, 600 + n], max_tokens=1) for n in range(10)]
    harness.run()
    assert engine.counts.computed_tokens == len(document) + 10 * 2
    assert [reply.tokens for reply in replies] == [
        cold([*document, 500 + n, 600 + n], max_tokens=1) for n in range(10)
    ]


def test_a_prefix_is_shared_while_its_first_user_is_still_generating() -> None:
    engine = FakeEngine()
    harness = RuntimeHarness(engine)
    first = harness.submit(PROMPT, max_tokens=50)
    while not first.text:
        harness.scheduler.step()
    computed = engine.counts.computed_tokens
    second = harness.ask([*PROMPT, 7, 8], max_tokens=1)
    assert not first.ended
    assert second.reused == len(PROMPT)
    assert second.finished.cache.tier == "device"
    assert engine.counts.exported_tokens == engine.counts.restored_tokens == 0
    assert engine.counts.computed_tokens - computed <= 2 + 5  # the new tokens, and first's own
    harness.run(first)
    assert first.tokens == cold(PROMPT, max_tokens=50)


def test_identical_cold_requests_cost_one_prefill() -> None:
    engine = FakeEngine()
    harness = RuntimeHarness(engine, parallel=4)
    for _ in range(50):
        harness.submit(PROMPT, max_tokens=1)
    harness.run()
    assert engine.counts.computed_tokens == len(PROMPT) + 49


def test_followers_go_on_when_the_leader_is_cancelled() -> None:
    engine = FakeEngine(batch_tokens=24)
    harness = RuntimeHarness(engine)
    leader = harness.submit(PROMPT, max_tokens=1)
    follower = harness.submit([*PROMPT, 9], max_tokens=1)
    harness.scheduler.step()
    assert 0 < leader.turn.held_tokens < len(PROMPT)
    harness.cancel(leader)
    harness.run(follower)
    assert isinstance(leader.events[-1], Cancelled)
    assert engine.counts.computed_tokens == len(PROMPT) + 1
    assert follower.tokens == cold([*PROMPT, 9], max_tokens=1)


def test_a_cancelled_prefill_keeps_its_blocks() -> None:
    engine = FakeEngine(batch_tokens=24)
    harness = RuntimeHarness(engine, idle_tokens=0)
    for _ in range(2):
        reply = harness.submit(PROMPT, max_tokens=1)
        harness.scheduler.step()
        harness.cancel(reply)
    harness.ask(PROMPT, max_tokens=1)
    assert engine.counts.computed_tokens == len(PROMPT)


def test_a_cancelled_turn_is_gone_wherever_it_was() -> None:
    engine = FakeEngine()
    harness = RuntimeHarness(engine, parallel=1)
    running = harness.submit(PROMPT, max_tokens=100)
    waiting = harness.submit([5, 6, 7], max_tokens=100)
    harness.scheduler.step()
    harness.cancel(waiting)
    harness.cancel(running)
    assert isinstance(running.events[-1], Cancelled)
    assert isinstance(waiting.events[-1], Cancelled)
    assert harness.scheduler.turns == 0
    assert not harness.scheduler.cancel(99)


def test_opting_out_neither_reuses_nor_keeps() -> None:
    engine = FakeEngine()
    harness = RuntimeHarness(engine)
    harness.ask(PROMPT, reuse=False)
    harness.offload()
    assert len(harness.store) == 0
    assert engine.open_sequences == 0
    harness.ask(PROMPT)
    refused = harness.ask(PROMPT, reuse=False)
    assert refused.reused == 0
    assert refused.finished.cache.reason == "opted_out"


def test_another_salt_shares_nothing_in_any_tier() -> None:
    engine = FakeEngine()
    harness = RuntimeHarness(engine)
    harness.ask(PROMPT, salt=b"a")
    assert harness.ask(PROMPT, salt=b"b").reused == 0  # still in the pool
    harness.offload()
    assert harness.kv.make_room(engine.pool_tokens)
    assert harness.ask(PROMPT, salt=b"c").reused == 0  # in RAM
    assert harness.ask(PROMPT, salt=b"a").reused == len(PROMPT) - 1


def test_a_turn_waits_rather_than_fails_when_the_pool_is_full() -> None:
    engine = FakeEngine(pool_tokens=200, context_tokens=200)
    harness = RuntimeHarness(engine, parallel=4)
    replies = [harness.submit([n] * 120, max_tokens=30) for n in range(100, 106)]
    harness.run()
    for number, reply in zip(range(100, 106), replies, strict=True):
        assert reply.tokens == cold([number] * 120, max_tokens=30)


def test_replies_that_outgrow_the_pool_are_preempted_and_still_right() -> None:
    engine = FakeEngine(pool_tokens=256, context_tokens=256)
    harness = RuntimeHarness(engine, parallel=4)
    replies = [harness.submit([n, n], max_tokens=200) for n in range(100, 103)]
    harness.run()
    assert harness.kv.counts.preemptions > 0
    for number, reply in zip(range(100, 103), replies, strict=True):
        assert reply.tokens == cold([number, number], max_tokens=200)


def test_a_broken_step_loses_no_turn() -> None:
    engine = FakeEngine(break_steps={3, 9, 10})
    harness = RuntimeHarness(engine, parallel=3)
    replies = [harness.submit([n] * 40, max_tokens=20) for n in range(100, 103)]
    harness.run()
    assert engine.counts.resets == 3
    for number, reply in zip(range(100, 103), replies, strict=True):
        assert reply.tokens == cold([number] * 40, max_tokens=20)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=1, top_p=0.9, seed=3),
        SamplingParams(temperature=0, presence_penalty=2.0, frequency_penalty=1.0),
    ],
)
def test_a_step_that_breaks_after_tokens_were_chosen_changes_no_reply(
    sampling: SamplingParams, tmp_path: Path
) -> None:
    """As one of several native calls may: what the first chose is lost."""
    options = EngineOptions(path=write_numpy(tmp_path / f"tiny{SUFFIX}", context=256), parallel=2)
    prompt = list(range(65, 100))

    class Breaking(NumpyEngine):
        left = 8

        def collect(self, pending: Pending) -> list[Sampled | None]:
            chosen = super().collect(pending)
            self.left -= 1
            if not self.left:
                self.sequences.reset()
                raise EngineBroken("the second call failed")
            return chosen

    expected = RuntimeHarness(NumpyEngine(options)).ask(prompt, max_tokens=24, sampling=sampling)
    harness = RuntimeHarness(Breaking(options))
    assert harness.ask(prompt, max_tokens=24, sampling=sampling).tokens == expected.tokens


def test_a_restore_that_breaks_the_engine_is_computed_instead() -> None:
    engine = FakeEngine()
    harness = RuntimeHarness(engine, idle_tokens=0)
    harness.ask(PROMPT)
    engine.break_restores = 1
    again = harness.ask([*PROMPT, 5])
    assert engine.counts.resets == 1
    assert again.tokens == cold([*PROMPT, 5])


def test_a_block_that_breaks_the_engine_is_tried_only_once() -> None:
    engine = FakeEngine()
    harness = RuntimeHarness(engine, idle_tokens=0)
    harness.ask(PROMPT)
    blocks = len(harness.store)
    engine.break_restores = 1
    waiting = harness.submit([*PROMPT, 5], max_tokens=50)
    harness.scheduler.step()
    assert len(harness.store) < blocks
    harness.cancel(waiting)  # between breaking and starting again it holds nothing
    harness.offload()
    assert harness.kv.make_room(engine.pool_tokens)
    assert engine.open_sequences == 0


def test_an_engine_that_always_breaks_fails_its_turns_with_a_message() -> None:
    engine = FakeEngine(break_steps=set(range(1, 100)))
    harness = RuntimeHarness(engine)
    reply = harness.ask(PROMPT)
    failed = reply.events[-1]
    assert isinstance(failed, Failed)
    assert failed.error.status == 500
    assert "engine failed repeatedly" in failed.error.message
    assert engine.open_sequences == 0


def test_progress_is_told_when_asked_for() -> None:
    harness = RuntimeHarness(FakeEngine(batch_tokens=24))
    reply = harness.ask(PROMPT, progress=True)
    progress = [event.done_tokens for event in reply.events if isinstance(event, Prefill)]
    assert progress == sorted(progress)
    assert progress[-1] == len(PROMPT)


@pytest.mark.long
@settings(max_examples=rounds(60, 400), deadline=None)
@given(
    prompts=st.lists(
        st.tuples(st.integers(0, 90), st.integers(0, 3), st.integers(1, 12), st.booleans()),
        min_size=1,
        max_size=12,
    ),
    pool=st.sampled_from([128, 160, 1024]),
    ram=st.sampled_from([0, 20_000, 1 << 20]),
    resident=st.sampled_from([0, 64, 1 << 20]),
    breaks=st.sets(st.integers(1, 60), max_size=2),
    can_truncate=st.booleans(),
    steps=st.lists(st.integers(0, 6), min_size=12, max_size=12),
    cancels=st.sets(st.integers(0, 11), max_size=3),
)
def test_whatever_happens_every_answer_is_the_cold_one(
    prompts: list[tuple[int, int, int, bool]],
    pool: int,
    ram: int,
    resident: int,
    breaks: set[int],
    can_truncate: bool,
    steps: list[int],
    cancels: set[int],
) -> None:
    """Overlapping prompts, tiny budgets, breakage and cancellations, in any order."""
    engine = FakeEngine(
        pool_tokens=pool,
        context_tokens=128,
        break_steps=breaks,
        break_restores=min(len(breaks), 1),
        can_truncate=can_truncate,
    )
    harness = RuntimeHarness(engine, parallel=3, ram_bytes=ram, idle_tokens=resident)
    submitted = []
    for number, (length, branch, limit, exact) in enumerate(prompts):
        tokens = [*range(100, 100 + length), *([branch] * 5)]
        submitted.append((harness.submit(tokens, max_tokens=limit, exact=exact), tokens, limit))
        for _ in range(steps[number]):
            harness.scheduler.step()
        if number in cancels:
            harness.cancel(submitted[-1][0])
    harness.run()
    harness.offload()
    for reply, tokens, limit in submitted:
        if isinstance(reply.events[-1], Finished):
            assert reply.tokens == cold(tokens, can_truncate=can_truncate, max_tokens=limit)
        else:
            assert isinstance(reply.events[-1], Cancelled)
    assert harness.store.tiers[0].budget.used_bytes <= ram
    assert harness.scheduler.turns == 0
    assert harness.kv.make_room(pool)
    assert engine.open_sequences == 0


# -- priority ------------------------------------------------------------------------------------


def order_of_starts(harness: RuntimeHarness, *turns: tuple[str, int]) -> list[str]:
    """Names of turns in the order in which they start, one at a time."""
    harness.submit([1], max_tokens=3)
    harness.scheduler.step()  # takes the one sequence; the others queue
    replies = {
        name: harness.submit([10 + number], priority=priority, max_tokens=1)
        for number, (name, priority) in enumerate(turns)
    }
    started: dict[str, None] = {}  # ordered
    while len(started) < len(replies):
        harness.scheduler.step()
        started |= dict.fromkeys(name for name, reply in replies.items() if reply.started)
    return list(started)


def test_an_urgent_turn_goes_first_and_equals_go_in_order() -> None:
    harness = RuntimeHarness(FakeEngine(), parallel=1)
    started = order_of_starts(harness, ("first", 0), ("low", -1), ("second", 0), ("urgent", 1))
    assert started == ["urgent", "first", "second", "low"]


def test_nobody_waits_for_ever() -> None:
    """However many urgent turns come, only so many of them overtake."""
    harness = RuntimeHarness(FakeEngine(), parallel=1)
    harness.submit([1], max_tokens=2)
    harness.scheduler.step()
    patient = harness.submit([2], priority=-1, max_tokens=1)
    for number in range(200):
        harness.submit([3 + number], priority=1, max_tokens=1)
        for _ in range(3):
            harness.scheduler.step()
        if patient.ended:
            break
    assert patient.ended
    assert number <= 2 * 8


@pytest.mark.parametrize("can_truncate", [True, False])
def test_a_client_that_gives_up_five_times_computes_each_token_once(can_truncate: bool) -> None:
    engine = FakeEngine(batch_tokens=16, can_truncate=can_truncate)
    harness = RuntimeHarness(engine)
    prompt = list(range(100, 400))
    for steps in (2, 3, 4, 5, 6):
        reply = harness.submit(prompt)
        for _ in range(steps):
            harness.scheduler.step()
        harness.cancel(reply)
    expected = cold(prompt, max_tokens=1, can_truncate=can_truncate)
    assert harness.ask(prompt, max_tokens=1).tokens == expected
    assert engine.counts.computed_tokens == len(prompt)


# -- where the engine computes beside ----------------------------------------------------------


def test_replies_are_delivered_while_the_next_step_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rekindle.runtime.schedule.outbox.MAX_DELAY_S", 0.0)
    engine = FakeEngine(async_launch=True)
    harness = RuntimeHarness(engine)
    replies = [harness.submit([number] * 20, max_tokens=8) for number in (1, 2)]
    in_flight: list[bool] = []
    emit = harness.scheduler._emit

    def note(events: list[Event]) -> None:
        in_flight.append(engine.in_flight)
        emit(events)

    harness.scheduler._emit = note
    for reply in replies:
        harness.run(reply)
    assert in_flight.count(True) >= 6


@pytest.mark.parametrize("max_tokens", [1, 2, 9])
def test_answers_and_counts_are_those_of_an_engine_that_does_not(max_tokens: int) -> None:
    prompts = [[number] * (20 + number) for number in range(1, 6)]
    said = []
    for async_launch in (False, True):
        engine = FakeEngine(async_launch=async_launch)
        harness = RuntimeHarness(engine)
        replies = [harness.submit(prompt, max_tokens=max_tokens) for prompt in prompts]
        for reply in replies:
            harness.run(reply)
        again = [harness.ask([*reply.turn.tokens.ids, 7], max_tokens=3) for reply in replies]
        said.append(
            [(reply.tokens, reply.finished.completion_tokens) for reply in (*replies, *again)]
        )
        assert all(reply.reused >= reply.turn.prompt_tokens - 2 for reply in again)
        assert harness.scheduler.turns == 0
    assert said[0] == said[1]


def test_a_turn_computes_nothing_beyond_its_limit_or_its_end() -> None:
    engine = FakeEngine(async_launch=True, context_tokens=64, pool_tokens=64)
    harness = RuntimeHarness(engine)
    reply = harness.ask([1] * 40, max_tokens=24)  # to the very end of the context
    assert len(reply.tokens) == 24
    assert engine.counts.computed_tokens == 63


def test_a_cancel_delivers_what_was_sampled_before() -> None:
    engine = FakeEngine(async_launch=True)
    harness = RuntimeHarness(engine)
    reply = harness.submit([1] * 20, max_tokens=100)
    for _ in range(10):
        harness.scheduler.step()
    said = len(reply.text.split())
    assert said < len(reply.tokens)
    harness.cancel(reply)
    assert len(reply.text.split()) == len(reply.tokens)
    assert harness.scheduler.turns == 0
    assert engine.open_sequences == 1  # idle


def test_an_engine_that_breaks_loses_no_token_that_was_sampled() -> None:
    expected = RuntimeHarness(FakeEngine()).ask([1] * 20, max_tokens=20).tokens
    for step in range(2, 20):
        engine = FakeEngine(async_launch=True, break_steps={step})
        harness = RuntimeHarness(engine)
        assert harness.ask([1] * 20, max_tokens=20).tokens == expected
        assert engine.counts.resets == 1


def test_a_turn_ends_at_a_stop_string_though_a_step_is_under_way() -> None:
    expected = RuntimeHarness(FakeEngine()).ask([1] * 20, max_tokens=20).tokens
    stop = f"{expected[6]} "
    engine = FakeEngine(async_launch=True)
    harness = RuntimeHarness(engine)
    reply = harness.ask([1] * 20, max_tokens=20, stop=(stop,))
    assert reply.finished.reason == "stop"
    assert reply.finished.completion_tokens == expected.index(expected[6]) + 1
    again = harness.ask([*[1] * 20, *expected[:8]], max_tokens=1)
    assert again.tokens == expected[8:9]


def test_a_turn_that_ends_while_the_pool_is_full_resets_nothing() -> None:
    for max_tokens in range(60, 80):
        engine = FakeEngine(async_launch=True, pool_tokens=280, context_tokens=270)
        harness = RuntimeHarness(engine)
        harness.submit([1] * 80, max_tokens=max_tokens, reuse=False)
        harness.submit([2] * 60, max_tokens=190)
        harness.run()
        assert engine.counts.resets == 0


def test_a_cancel_survives_an_engine_that_breaks_while_others_are_kept() -> None:
    class Breaking(FakeSequences):
        is_bad = False

        def export(self, *given: Any, **named: Any) -> bytes:
            if self.is_bad:
                self.is_bad = False
                self.reset()
                raise EngineBroken("export failed")
            return super().export(*given, **named)

    engine = FakeEngine(async_launch=True)
    engine.sequences = sequences = Breaking(engine)
    harness = RuntimeHarness(engine, idle_tokens=0)
    ending = harness.submit([1] * 40, max_tokens=5)
    other = harness.submit([2] * 40, max_tokens=50)
    third = harness.submit([3] * 40, max_tokens=50)
    while len(ending.tokens) < 5:
        harness.scheduler.step()
    sequences.is_bad = True
    harness.cancel(other)
    assert isinstance(other.events[-1], Cancelled)
    assert ending.ended
    harness.run(third)
    assert third.tokens == RuntimeHarness(FakeEngine()).ask([3] * 40, max_tokens=50).tokens


def test_a_stop_string_found_during_a_step_ends_the_turn_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine of this test fails if a sequence is touched while a step is in flight."""
    monkeypatch.setattr("rekindle.runtime.schedule.outbox.MAX_DELAY_S", 0.0)
    expected = RuntimeHarness(FakeEngine()).ask([1] * 20, max_tokens=20).tokens
    engine = FakeEngine(async_launch=True)
    harness = RuntimeHarness(engine, idle_tokens=0)
    ended = harness.submit([1] * 20, max_tokens=20, stop=(f"{expected[6]} ",))
    other = harness.submit([2] * 20, max_tokens=20)
    finished: list[bool] = []
    emit = harness.scheduler._emit

    def note(events: list[Event]) -> None:
        finished.extend(engine.in_flight for each in events if isinstance(each, Finished))
        emit(events)

    harness.scheduler._emit = note
    harness.run(ended, other)
    assert finished == [False, False]
    assert ended.finished.reason == "stop"


@pytest.mark.parametrize("async_launch", [False, True])
def test_a_token_without_text_sends_no_empty_message(*, async_launch: bool) -> None:
    prompt = list(range(100, 140))
    text = RuntimeHarness(FakeEngine()).ask(prompt, max_tokens=12).text
    harness = RuntimeHarness(FakeEngine(async_launch=async_launch))
    emit, sizes = harness.scheduler._emit, list[int]()

    def note(events: list[Event]) -> None:
        sizes.append(len(events))
        emit(events)

    harness.scheduler._emit = note
    harness.ask(prompt, max_tokens=12, stop=(text[3:40] + "never",))
    assert 0 not in sizes


def test_a_turn_that_fails_is_told_so_even_if_keeping_its_state_breaks_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = FakeEngine()
    harness = RuntimeHarness(engine)
    reply = harness.submit(list(range(100, 160)), max_tokens=200)
    for _ in range(6):
        harness.scheduler.step()

    def refuse(*_given: object) -> None:
        raise ServerError("no memory")

    def broken(*_given: object, **_named: object) -> None:
        harness.kv.release(reply.turn)
        engine.sequences.reset()
        raise EngineBroken("export failed")

    monkeypatch.setattr(harness.pipeline, "requantise", refuse)
    monkeypatch.setattr(harness.kv, "retire", broken)
    reply.turn.requantise_at = 1
    for _ in range(4):
        harness.scheduler.step()
    assert reply.ended
