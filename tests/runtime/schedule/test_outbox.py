"""Tokens that come fast are told together: none waits for long, and nothing else changes."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import pairwise
from typing import Any

import pytest

from rekindle.engine.base import Matrix, Pending, Sampled, Work
from rekindle.protocol.events import (
    ArgumentsDelta,
    Cancelled,
    Delta,
    Event,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallStart,
)
from rekindle.protocol.requests import Picture
from rekindle.runtime.schedule.outbox import MAX_DELAY_S, _merged
from tests.support.fake import AsciiTokenizer, FakeEngine, FakePending
from tests.support.harness import Reply, RuntimeHarness
from tests.support.pictures import drawn

PROMPT = list(range(100, 140))


class Clock:
    """Steps take as long as a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step_s: float) -> None:
        self.now_s, self.step_s = 100.0, step_s
        for module in ("batch", "outbox"):
            monkeypatch.setattr(f"rekindle.runtime.schedule.{module}.time", self)

    def monotonic(self) -> float:
        return self.now_s

    perf_counter = monotonic


class TimedEngine(FakeEngine):
    clock: Clock

    def collect(self, pending: Pending) -> list[Sampled | None]:
        self.clock.now_s += self.clock.step_s
        return super().collect(pending)


def ask(
    monkeypatch: pytest.MonkeyPatch,
    step_s: float,
    *,
    beside: bool = False,
    runs: bool = False,
    **request: Any,
) -> tuple[Reply, RuntimeHarness, list[tuple[float, list[Event]]]]:
    """A reply, and when which events were told."""
    engine = TimedEngine(async_launch=beside)
    engine.clock = Clock(monkeypatch, step_s)
    clock = engine.clock.perf_counter
    harness = RuntimeHarness(engine, is_undisturbed=lambda: runs, step_clock=clock)
    told: list[tuple[float, list[Event]]] = []
    emit = harness.scheduler._emit

    def note(events: list[Event]) -> None:
        told.append((engine.clock.now_s, list(events)))
        emit(events)

    harness.scheduler._emit = note
    reply = harness.submit(PROMPT, **{"max_tokens": 40, **request})
    harness.run(reply)
    return reply, harness, told


def texts(told: list[tuple[float, list[Event]]]) -> list[str]:
    parts = [event.part for _, events in told for event in events if isinstance(event, Delta)]
    return [part.text for part in parts if isinstance(part, TextDelta)]


@pytest.mark.parametrize("beside", [False, True])
def test_fast_tokens_are_told_together_and_slow_ones_one_by_one(
    monkeypatch: pytest.MonkeyPatch, *, beside: bool
) -> None:
    fast, _, told_fast = ask(monkeypatch, MAX_DELAY_S / 8, beside=beside)
    slow, _, told_slow = ask(monkeypatch, MAX_DELAY_S * 2, beside=beside)
    assert fast.tokens == slow.tokens
    assert fast.text == slow.text == "".join(texts(told_fast))
    assert len(texts(told_slow)) == 40
    assert 5 <= len(texts(told_fast)) <= 8


@pytest.mark.parametrize("runs", [False, True])
@pytest.mark.parametrize("beside", [False, True])
def test_no_token_waits_longer_than_it_may(
    monkeypatch: pytest.MonkeyPatch, *, beside: bool, runs: bool
) -> None:
    for step_s in (MAX_DELAY_S / 20, MAX_DELAY_S / 3, MAX_DELAY_S / 1.5):
        _, _, told = ask(monkeypatch, step_s, beside=beside, runs=runs, max_tokens=150)
        times = [when for when, events in told if any(isinstance(each, Delta) for each in events)]
        gaps = [after - before for before, after in pairwise(times)]
        assert max(gaps) <= MAX_DELAY_S + (2.01 if beside else 1.01) * step_s


def test_the_first_token_and_the_last_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, told = ask(monkeypatch, MAX_DELAY_S / 50, max_tokens=20)
    assert len(texts(told)[0].split()) == 1
    engine = TimedEngine()
    engine.clock = Clock(monkeypatch, MAX_DELAY_S / 50)
    harness = RuntimeHarness(engine)
    harness.submit(PROMPT, max_tokens=200)
    short = harness.submit(PROMPT[::-1], max_tokens=12)
    while not short.turn.is_over:
        harness.scheduler.step()
    assert short.ended


def test_a_reply_that_its_text_may_end_is_told_token_by_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, _, _ = ask(monkeypatch, MAX_DELAY_S / 50)
    stop = plain.text.split()[10]
    reply, _, told = ask(monkeypatch, MAX_DELAY_S / 50, stop=[stop])
    assert reply.finished.reason == "stop"
    assert reply.text == plain.text[: plain.text.index(stop)]
    assert len(texts(told)) >= 9


@pytest.mark.parametrize("prompts", [(300,), (63, 1), (15, 1)])
def test_nothing_waits_for_a_prompt_that_is_read(
    monkeypatch: pytest.MonkeyPatch, prompts: tuple[int, ...]
) -> None:
    engine = TimedEngine()
    engine.clock = clock = Clock(monkeypatch, MAX_DELAY_S / 50)
    harness = RuntimeHarness(engine)
    talking = harness.submit(PROMPT, max_tokens=200)
    while talking.turn.generated_tokens < 12:
        harness.scheduler.step()
    assert len(talking.text.split()) < 12  # some wait
    for tokens in prompts:
        harness.submit([600 + number % 300 for number in range(tokens)])
    clock.step_s = 1.0
    seen: list[int] = []
    launch = engine.launch

    def note(work: Seq[Work]) -> FakePending:
        seen.append(talking.turn.generated_tokens - len(talking.text.split()))
        return launch(work)

    monkeypatch.setattr(engine, "launch", note)
    harness.scheduler.step()
    assert seen == [0]


def test_parts_that_go_on_with_one_another_become_one_with_all_log_probabilities() -> None:
    logged = [TokenLogprob(b"%d" % number, -1.0, []) for number in range(4)]
    events: list[Event] = [
        Delta(1, TextDelta("a", [logged[0]])),
        Delta(2, TextDelta("x")),
        Delta(1, TextDelta("b", [logged[1], logged[2]])),
        Delta(2, ReasoningDelta("y")),
        Delta(2, ReasoningDelta("yy")),
        Delta(2, TextDelta("z", [logged[3]])),
        Delta(1, TextDelta("c")),
        Delta(3, ToolCallStart(0, "look")),
        Delta(3, ArgumentsDelta(0, "{")),
        Delta(3, ArgumentsDelta(0, "}")),
        Delta(3, ArgumentsDelta(1, "{}")),
        Cancelled(1),
    ]
    assert _merged(events) == [
        Delta(1, TextDelta("abc", logged[:3])),
        Delta(2, TextDelta("x")),
        Delta(2, ReasoningDelta("yyy")),
        Delta(2, TextDelta("z", [logged[3]])),
        Delta(3, ToolCallStart(0, "look")),
        Delta(3, ArgumentsDelta(0, "{}")),
        Delta(3, ArgumentsDelta(1, "{}")),
        Cancelled(1),
    ]


def test_a_cancel_tells_what_was_computed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TimedEngine()
    engine.clock = Clock(monkeypatch, MAX_DELAY_S / 50)
    harness = RuntimeHarness(engine)
    reply = harness.submit(PROMPT, max_tokens=200)
    while reply.turn.generated_tokens < 12:
        harness.scheduler.step()
    harness.cancel(reply)
    assert len(reply.text.split()) == reply.turn.generated_tokens


@pytest.mark.parametrize("beside", [False, True])
def test_nothing_waits_for_a_picture_that_is_encoded(
    monkeypatch: pytest.MonkeyPatch, *, beside: bool
) -> None:
    asked = [{"type": "text", "text": "look at this"}, {"type": "image"}]
    engine = TimedEngine(sees=True, async_launch=beside)
    engine.tokenizer = AsciiTokenizer()
    engine.clock = Clock(monkeypatch, MAX_DELAY_S / 50)
    harness = RuntimeHarness(engine)
    harness.ask_chat([{"role": "user", "content": asked}], [drawn(1)])
    talking = harness.submit(PROMPT, max_tokens=400)
    while talking.turn.generated_tokens < 12:
        harness.scheduler.step()
    waiting: list[int] = []
    encode = engine.encode_picture

    def note(picture: Picture) -> list[Matrix]:
        waiting.append(talking.turn.generated_tokens - talking.turn.output.tokens)
        return encode(picture)

    monkeypatch.setattr(engine, "encode_picture", note)
    harness.submit_chat([{"role": "user", "content": asked}], [drawn(2)])
    while not waiting:
        harness.scheduler.step()
    assert waiting == [0]
