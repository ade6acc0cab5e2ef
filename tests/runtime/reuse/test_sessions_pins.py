"""A temporary pin protects an entry for its time; afterwards the entry is an ordinary one."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.kvcache.entries.entries import Entry
from rekindle.protocol.admin import PinEntry
from rekindle.protocol.requests import Names, Prepare
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
    harness = RuntimeHarness(FakeEngine(), clock=clock, ram_bytes=30_000, idle_tokens=0)
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


def test_a_pin_that_does_not_fit_is_reported() -> None:
    roomy, small = RuntimeHarness(FakeEngine()), RuntimeHarness(FakeEngine(), ram_bytes=1000)
    for harness, refused in ((roomy, False), (small, True)):
        assert harness.ask(PROMPT, names=FIVE_MINUTES).finished.cache.pin_refused == refused
        assert bool(pinned(harness)) != refused
        assert not harness.ask(going_on(harness.ask(PROMPT))).finished.cache.pin_refused


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


def test_a_pin_with_a_ttl_lasts_that_long_after_the_last_use(
    tmp_path: Path, clock: FakeClock
) -> None:
    harness = RuntimeHarness(FakeEngine(), clock=clock, folder=tmp_path)
    ready = harness.ask(PROMPT, prepare=Prepare(pinned=True, ttl_s=1000.0))
    for_good = harness.ask([7, *PROMPT], prepare=Prepare(pinned=True, ttl_s=None))
    key = ready.finished.cache.new_cache_key
    clock.pass_by(900)
    assert harness.ask([*PROMPT, 1], names=Names(cache_key=key)).finished.cache.status == "hit"
    clock.pass_by(900)
    harness.close()
    harness = RuntimeHarness(FakeEngine(), clock=clock, folder=tmp_path)
    harness.entries.collect()
    assert len(pinned(harness)) == 2
    clock.pass_by(301)  # every entry lives for five minutes after a restart
    report = harness.ask([*PROMPT, 1], names=Names(cache_key=key)).finished.cache
    assert report.reason == "expired"
    harness.entries.collect()
    assert [entry.key for entry in pinned(harness)] == [for_good.finished.cache.new_cache_key]
    assert harness.entries.retention.pinned_bytes[None] == pinned(harness)[0].cost_bytes
    harness.close()


def test_an_entry_that_is_pinned_by_its_key_never_expires(clock: FakeClock) -> None:
    harness = RuntimeHarness(FakeEngine(), clock=clock)
    ready = harness.ask(PROMPT, prepare=Prepare(pinned=True, ttl_s=1000.0))
    key = ready.finished.cache.new_cache_key
    assert key is not None
    harness.administer(PinEntry(key, pinned=True))
    clock.pass_by(10**6)
    harness.entries.collect()
    assert len(pinned(harness)) == 1
    harness.administer(PinEntry(key, pinned=False))
    clock.pass_by(1001)
    assert harness.entries.collect()[0] == 1


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
