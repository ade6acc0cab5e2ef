"""A temporary pin protects an entry for its time; afterwards the entry is an ordinary one."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.kvcache.entries.entries import Entry
from rekindle.protocol.requests import Names
from tests.runtime.reuse.test_sessions import PROMPT, going_on
from tests.support.clock import FakeClock
from tests.support.fake import AsciiTokenizer, FakeEngine
from tests.support.harness import RuntimeHarness

FIVE_MINUTES = Names(pin_s=300.0)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def pinned(harness: RuntimeHarness) -> list[Entry]:
    return [entry for entry in harness.entries.of(None) if entry.pinned]


def press(harness: RuntimeHarness) -> None:
    """Fill the cache with other conversations until it evicts."""
    for number in range(20):
        harness.ask([500 + number] * 40)


def test_state_is_not_evicted_while_it_is_pinned(clock: FakeClock) -> None:
    harness = RuntimeHarness(FakeEngine(), clock=clock, ram_bytes=20_000, idle_tokens=0)
    kept = harness.ask(PROMPT[:32], names=FIVE_MINUTES)
    press(harness)
    clock.pass_by(299)
    harness.entries.collect()
    again = harness.ask(going_on(kept)).finished.cache
    assert again.reused_tokens == len(kept.turn.tokens) - 1
    clock.pass_by(2)
    harness.entries.collect()
    assert pinned(harness) == []
    press(harness)
    assert harness.ask(going_on(kept)).finished.cache.reused_tokens == 0


def test_a_continued_conversation_has_a_single_pin(clock: FakeClock) -> None:
    engine = FakeEngine()
    engine.tokenizer = AsciiTokenizer()
    harness = RuntimeHarness(engine, clock=clock)
    text = "Once upon a time"
    for _ in range(4):
        text += harness.ask_text(text, names=FIVE_MINUTES).text + " and then"
    [entry] = harness.entries.of(None)
    assert entry.pinned


def test_a_shorter_pin_does_not_shorten_a_longer_one(clock: FakeClock) -> None:
    harness = RuntimeHarness(FakeEngine(), clock=clock)
    first = harness.ask(PROMPT, names=Names(pin_s=3600.0))
    harness.ask(going_on(first), names=FIVE_MINUTES)
    clock.pass_by(301)
    harness.entries.collect()
    [entry] = pinned(harness)
    assert entry.tokens == first.turn.tokens.all()


def test_a_temporary_pin_without_room_is_skipped_silently(clock: FakeClock) -> None:
    harness = RuntimeHarness(FakeEngine(), clock=clock, ram_bytes=2_000, idle_tokens=0)
    assert harness.ask(list(range(100, 300)), names=FIVE_MINUTES).finished.reason == "length"
    assert pinned(harness) == []


def test_a_temporary_pin_does_not_become_permanent_after_a_restart(
    tmp_path: Path, clock: FakeClock
) -> None:
    harness = RuntimeHarness(FakeEngine(), clock=clock, folder=tmp_path)
    harness.ask(PROMPT, names=FIVE_MINUTES)
    assert len(pinned(harness)) == 1
    harness.close()
    again = RuntimeHarness(FakeEngine(), clock=clock, folder=tmp_path)
    assert pinned(again) == []
    again.close()
