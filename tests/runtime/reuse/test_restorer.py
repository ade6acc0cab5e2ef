"""Restoring stored state is bounded in time and in memory, and does not delay other turns."""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.kvcache import codec
from rekindle.kvcache.codec import Record
from rekindle.kvcache.disk.block_files import BlockReading
from rekindle.kvcache.tiers.disk import DiskTier
from rekindle.memory import Allocate, plain_memory
from rekindle.protocol.admin import GetStats, Stats
from rekindle.protocol.events import Cancelled
from rekindle.runtime.reuse.restorer import FETCH_TIMEOUT_S
from rekindle.tokens import Tokens
from tests.kvcache.records import flip
from tests.support.clock import FakeClock
from tests.support.fake import CELL_BYTES, FakeEngine
from tests.support.harness import Reply, RuntimeHarness
from tests.support.memory_tier import MemoryTier
from tests.support.rounds import rounds

PATIENCE_S = 60.0
BLOCK_BYTES = 8 * CELL_BYTES
SYSTEM = list(range(200, 264))  # eight blocks


class Resumed:
    """A runtime whose conversations are stored on a slow tier."""

    def __init__(self, *prompts: list[int], **harness: Any) -> None:
        shelf: dict[bytes, bytes] = {}
        before = RuntimeHarness(FakeEngine(), shelf=shelf, idle_tokens=0)
        for prompt in prompts:
            before.ask(prompt)
        before.close()
        self.clock = FakeClock()
        self.engine = FakeEngine(context_tokens=2048, pool_tokens=16384, max_sequences=24)
        self.harness = RuntimeHarness(
            self.engine, shelf=shelf, clock=self.clock, idle_tokens=0, **harness
        )
        assert self.harness.memory is not None
        self.tier = self.harness.memory

    def step(self, *replies: Reply) -> None:
        """Run enough steps for turns that do not wait for the tier."""
        for _ in range(200):
            self.harness.take_events()
            self.harness.scheduler.step()
            if all(reply.ended for reply in replies):
                return


def cold(tokens: list[int], **ask: Any) -> list[int]:
    return RuntimeHarness(FakeEngine()).ask(tokens, **ask).tokens


# -- time limits --


def test_after_a_hanging_read_times_out_the_prompt_is_computed() -> None:
    resumed = Resumed(SYSTEM)
    resumed.tier.hangs = True
    reply = resumed.harness.submit([*SYSTEM, 1])
    resumed.step(reply)
    assert not reply.ended
    resumed.clock.pass_by(FETCH_TIMEOUT_S)
    resumed.step(reply)
    assert reply.tokens == cold([*SYSTEM, 1])
    assert (reply.finished.cache.status, reply.finished.cache.reason) == ("miss", "fetch_timeout")


def test_a_hanging_read_does_not_delay_other_turns() -> None:
    resumed = Resumed(SYSTEM)
    resumed.tier.hangs = True
    replies = [resumed.harness.submit([*SYSTEM, number]) for number in range(3)]
    resumed.step(*replies)
    assert not any(reply.ended for reply in replies)
    resumed.clock.pass_by(FETCH_TIMEOUT_S)
    resumed.step(*replies)
    assert all(reply.ended for reply in replies)
    assert resumed.engine.counts.computed_tokens < 2 * len(
        SYSTEM
    )  # the shared prefix is computed once


def test_a_tier_with_a_hanging_read_is_skipped_until_it_answers() -> None:
    resumed = Resumed(SYSTEM, [1] * 20, [2] * 20)
    resumed.tier.hangs = True
    late = resumed.harness.submit(SYSTEM)
    resumed.step(late)
    resumed.clock.pass_by(FETCH_TIMEOUT_S)
    resumed.step(late)
    other = resumed.harness.submit([1] * 20)
    resumed.step(other)  # without waiting at all
    assert (other.reused, other.finished.cache.reason) == (0, "fetch_timeout")
    resumed.tier.hangs = False
    resumed.harness.take_events()
    assert resumed.harness.ask([2] * 20).reused == 19


class HungDisk:
    """Makes every read of block files hang until `let_go`."""

    def __init__(self, disk: DiskTier) -> None:
        self._go_on = threading.Event()
        self._files = disk.folder.block_files
        self._reading = self._files.reading
        self._files.reading = self._hang  # type: ignore[method-assign]

    def _hang(self, key: bytes, size_bytes: int, allocate: Allocate = plain_memory) -> BlockReading:
        reading = self._reading(key, size_bytes, allocate)
        take_part = reading.take_part

        def hang(is_wanted: Callable[[], bool]) -> bool:
            self._go_on.wait(PATIENCE_S)
            return take_part(is_wanted)

        reading.take_part = hang  # type: ignore[assignment, method-assign]
        return reading

    def let_go(self) -> None:
        self._files.reading = self._reading  # type: ignore[method-assign]
        self._go_on.set()


def test_a_disk_whose_readers_all_hung_serves_again_after_they_return(tmp_path: Path) -> None:
    before = RuntimeHarness(FakeEngine(), folder=tmp_path)
    for number in range(3):
        before.ask([number] * 40)
    before.close()
    clock = FakeClock()
    harness = RuntimeHarness(FakeEngine(), folder=tmp_path, clock=clock, idle_tokens=0)
    assert harness.disk is not None
    hung = HungDisk(harness.disk)
    first = harness.submit([0] * 40)
    harness.scheduler.step()
    assert harness.scheduler.wait_s == FETCH_TIMEOUT_S
    clock.pass_by(FETCH_TIMEOUT_S)
    assert harness.scheduler.wait_s == 0.0
    harness.run(first)
    assert harness.ask([1] * 40).finished.cache.reason == "fetch_timeout"
    assert stats_of(harness).disk_state == "hung"
    hung.let_go()
    while harness.store.fetches.used_bytes:
        harness.take_events(wait=True)
    assert stats_of(harness).disk_state == "ok"
    reply = harness.ask([2] * 40)
    assert (reply.reused, reply.finished.cache.tier) == (39, "disk")
    warning, info = harness.log_lines
    assert (warning.level, info.level) == ("warning", "info")
    assert "does not answer" in warning.text
    harness.close()


def test_a_runtime_can_end_while_a_read_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = RuntimeHarness(FakeEngine(), folder=tmp_path)
    before.ask(SYSTEM)
    before.close()
    harness = RuntimeHarness(FakeEngine(), folder=tmp_path)
    assert harness.disk is not None
    hung = HungDisk(harness.disk)
    harness.submit(SYSTEM)
    harness.scheduler.step()
    monkeypatch.setattr("rekindle.kvcache.tiers.disk.LAST_READS_S", 0.0)
    harness.close()
    hung.let_go()


def stats_of(harness: RuntimeHarness) -> Stats:
    stats = harness.administer(GetStats(), admin=True)
    assert isinstance(stats, Stats)
    return stats


# -- memory limits --


class Watched:
    """Counts the bytes of fetched blocks that are still referenced."""

    def __init__(self, tier: MemoryTier) -> None:
        self._alive: list[tuple[weakref.ref[Record], int]] = []
        self._read = tier._open
        tier._open = self._open  # type: ignore[method-assign]

    def _open(self, key: bytes) -> Record:
        record = _WatchedRecord(*astuple(self._read(key)))
        self._alive.append((weakref.ref(record), len(record.blob)))
        return record

    @property
    def held_bytes(self) -> int:
        return sum(size for record, size in self._alive if record() is not None)


class _WatchedRecord(Record):
    __slots__ = ("__weakref__",)


def test_fetched_blocks_stay_within_their_share_of_the_budget() -> None:
    chats = [[number] * 240 for number in range(16)]  # thirty blocks each
    limit_bytes = 8 * BLOCK_BYTES
    resumed = Resumed(*chats, ram_bytes=0, fetch_bytes=limit_bytes, parallel=16)
    watched = Watched(resumed.tier)
    replies = [resumed.harness.submit(chat, max_tokens=1) for chat in chats]
    peak_bytes = 0
    while not all(reply.ended for reply in replies):
        resumed.harness.take_events()
        peak_bytes = max(peak_bytes, watched.held_bytes)
        resumed.harness.scheduler.step()
    assert BLOCK_BYTES <= peak_bytes <= limit_bytes
    assert {reply.reused for reply in replies} == {239}
    assert {reply.finished.cache.tier for reply in replies} == {"memory"}
    assert watched.held_bytes == resumed.harness.store.fetches.used_bytes == 0


def test_a_block_larger_than_the_share_is_still_fetched_one_at_a_time() -> None:
    resumed = Resumed(SYSTEM, ram_bytes=0, fetch_bytes=1)
    watched = Watched(resumed.tier)
    reply = resumed.harness.submit(SYSTEM)
    peak_bytes = 0
    while not reply.ended:
        resumed.harness.take_events()
        peak_bytes = max(peak_bytes, watched.held_bytes)
        resumed.harness.scheduler.step()
    assert peak_bytes == BLOCK_BYTES
    assert reply.reused == len(SYSTEM) - 1


def test_the_next_windows_are_read_while_the_first_are_restored() -> None:
    resumed = Resumed([1] * 240, ram_bytes=0, fetch_bytes=8 * BLOCK_BYTES)
    reply = resumed.harness.submit([1] * 240)
    resumed.harness.scheduler.step()
    resumed.harness.take_events()
    resumed.harness.scheduler.step()  # restores the first two windows of two blocks
    assert reply.turn.held_tokens == 4 * 8
    assert reply.is_fetching
    assert resumed.harness.store.fetches.used_bytes == 4 * BLOCK_BYTES
    resumed.harness.run(reply)
    assert reply.tokens == cold([1] * 240)


@pytest.mark.parametrize("damaged", [0, 3, 7])
def test_a_damaged_stripe_is_detected_before_its_block_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: int
) -> None:
    """Blocks are read in parallel, and the blocks before the damaged one are restored."""
    monkeypatch.setattr(codec, "STRIPE_BYTES", 32)
    monkeypatch.setattr(codec, "MIN_STRIPED_BYTES", 64)
    monkeypatch.setattr("rekindle.kvcache.tiers.disk.READER_BYTES", 64)
    monkeypatch.setattr("rekindle.kvcache.fetches.WINDOW_BYTES", BLOCK_BYTES)
    before = RuntimeHarness(FakeEngine(), folder=tmp_path)
    before.ask(SYSTEM)
    before.close()
    blocks = before.store.match(before.replies[1].turn.namespace, Tokens.of(SYSTEM)).blocks
    [file] = tmp_path.rglob(blocks[damaged].key.hex())
    flip(file, file.stat().st_size - codec.MAC_BYTES - 40)
    harness = RuntimeHarness(FakeEngine(), folder=tmp_path, idle_tokens=0)
    reply = harness.ask([*SYSTEM, 1])
    assert reply.tokens == cold([*SYSTEM, 1])
    assert (reply.reused, reply.finished.cache.reason) == (damaged * 8, "corrupt")
    while harness.store.fetches.used_bytes:  # wait for reads that no turn needs any more
        harness.take_events(wait=True)
    assert harness.disk is not None
    assert harness.disk.counts.corrupt_blocks == 1
    harness.close()


# -- cancelled turns --


def test_a_turn_cancelled_during_its_fetch_releases_everything() -> None:
    resumed = Resumed(SYSTEM)
    resumed.tier.hangs = True
    gone = resumed.harness.submit([*SYSTEM, 1])
    resumed.step(gone)
    assert gone.is_fetching
    resumed.harness.cancel(gone)
    assert isinstance(gone.events[-1], Cancelled)
    assert (resumed.harness.scheduler.turns, resumed.engine.open_sequences) == (0, 0)
    resumed.tier.hangs = False
    resumed.harness.take_events()
    assert resumed.harness.store.fetches.used_bytes == 0
    again = resumed.harness.ask([*SYSTEM, 1])
    assert again.reused == len(SYSTEM)
    assert again.tokens == cold([*SYSTEM, 1])


def test_turns_do_not_wait_for_memory_held_by_a_hanging_read_of_a_cancelled_turn() -> None:
    resumed = Resumed(SYSTEM, [1] * 40, fetch_bytes=1)
    resumed.tier.hangs = True
    gone = resumed.harness.submit(SYSTEM)
    resumed.step(gone)
    resumed.harness.cancel(gone)
    reply = resumed.harness.submit([1] * 40)
    resumed.step(reply)
    assert not reply.ended
    assert resumed.harness.scheduler.wait_s == FETCH_TIMEOUT_S
    resumed.clock.pass_by(FETCH_TIMEOUT_S)
    resumed.step(reply)
    assert (reply.reused, reply.finished.cache.reason) == (0, "fetch_timeout")


def test_a_turn_continues_when_the_turn_that_fetches_its_prefix_is_cancelled() -> None:
    resumed = Resumed(SYSTEM)
    resumed.tier.hangs = True
    leader, *followers = [resumed.harness.submit([*SYSTEM, number]) for number in range(50)]
    resumed.step(leader)
    assert not any(reply.is_fetching for reply in followers)
    resumed.harness.cancel(leader)
    resumed.tier.hangs = False
    resumed.harness.run(*followers)
    assert all(reply.reused == len(SYSTEM) for reply in followers)
    assert resumed.tier.counts.read_bytes == len(SYSTEM) * CELL_BYTES  # once for all turns


# -- other turns --


def test_a_reply_continues_while_a_long_conversation_is_restored() -> None:
    engine = FakeEngine(context_tokens=2048, pool_tokens=8192)
    harness = RuntimeHarness(engine, idle_tokens=0)
    long = [1] * 800  # a hundred blocks
    harness.ask(long, max_tokens=1)
    harness.kv.budget.step_bytes = 4 * BLOCK_BYTES
    talker = harness.submit([2, 3, 4], max_tokens=100)
    harness.scheduler.step()
    resumed = harness.submit([*long, 5], max_tokens=1)
    for _ in range(20):
        restored, said = engine.counts.restored_tokens, len(talker.tokens)
        harness.scheduler.step()
        assert engine.counts.restored_tokens - restored == 4 * 8
        assert len(talker.tokens) == said + 1
    harness.run(resumed)
    assert resumed.reused == 800
    assert (
        resumed.tokens
        == RuntimeHarness(FakeEngine(context_tokens=2048)).ask([*long, 5], max_tokens=1).tokens
    )


def finish(harness: RuntimeHarness, clock: FakeClock) -> None:
    """Step until all turns have ended. The clock advances when there is nothing to do."""
    for _ in range(10_000):
        if all(reply.ended for reply in harness.replies.values()):
            return
        harness.take_events()
        if not harness.scheduler.step():
            clock.pass_by(1.0)
    raise AssertionError("the turns do not end")


@pytest.mark.long
@settings(max_examples=rounds(40, 300), deadline=None)
@given(
    turns=st.lists(
        st.tuples(
            st.integers(0, 90),  # number of tokens in common with the others
            st.integers(0, 3),  # which continuation it takes
            st.booleans(),  # exact
            st.sampled_from(["nothing", "hang", "answer", "time passes", "cancel"]),
            st.integers(0, 6),  # steps after that
        ),
        min_size=1,
        max_size=12,
    ),
    pool=st.sampled_from([160, 1024]),
    ram=st.sampled_from([0, 20_000, 1 << 20]),
    idle=st.sampled_from([0, 64, 1 << 20]),
    fetch_bytes=st.sampled_from([1, 5 * BLOCK_BYTES // 2, 3 * BLOCK_BYTES, 1 << 20]),
    step_bytes=st.sampled_from([1, 2 * BLOCK_BYTES, 1 << 20]),
    breaks=st.sets(st.integers(1, 30), max_size=1),
    can_truncate=st.booleans(),
)
def test_every_answer_equals_the_cold_one_whatever_a_slow_tier_does(
    turns: list[tuple[int, int, bool, str, int]],
    pool: int,
    ram: int,
    idle: int,
    fetch_bytes: int,
    step_bytes: int,
    breaks: set[int],
    can_truncate: bool,
) -> None:
    shelf: dict[bytes, bytes] = {}
    before = RuntimeHarness(FakeEngine(can_truncate=can_truncate), shelf=shelf)
    expected = {}
    for length, branch, exact, *_ in turns:
        tokens = (*range(100, 100 + length), *[branch] * 5)
        expected[tokens] = before.ask(tokens, exact=exact).tokens
    before.close()
    clock = FakeClock()
    engine = FakeEngine(
        pool_tokens=pool,
        context_tokens=128,
        break_steps=breaks,
        break_restores=len(breaks),
        can_truncate=can_truncate,
    )
    harness = RuntimeHarness(
        engine, shelf=shelf, clock=clock, parallel=3, ram_bytes=ram, idle_tokens=idle,
        fetch_bytes=fetch_bytes,
    )  # fmt: skip
    assert harness.memory is not None
    harness.kv.budget.step_bytes = step_bytes
    replies = []
    for length, branch, exact, event, steps in turns:
        tokens = (*range(100, 100 + length), *[branch] * 5)
        replies.append((harness.submit(tokens, exact=exact), tokens))
        if event in ("hang", "answer"):
            harness.memory.hangs = event == "hang"
        clock.pass_by(FETCH_TIMEOUT_S if event == "time passes" else 0.0)
        for _ in range(steps):
            harness.take_events()
            harness.scheduler.step()
        if event == "cancel":
            harness.cancel(replies[-1][0])
    finish(harness, clock)
    for reply, tokens in replies:
        if not isinstance(reply.events[-1], Cancelled):
            assert reply.tokens == expected[tokens]
    harness.memory.hangs = False
    harness.take_events()
    harness.offload()
    assert harness.store.fetches.used_bytes == 0
    assert harness.scheduler.turns == 0
    for _ in range(100):  # within the budget of each
        harness.kv.budget.renew(is_shared=False)
        harness.kv.make_room(pool)
    assert engine.open_sequences == 0


@pytest.mark.parametrize("fetch_blocks", [2.2, 2.5, 2.9, 5.0, 6.0])
@pytest.mark.long
def test_a_turn_never_waits_for_memory_that_its_own_reads_hold(fetch_blocks: float) -> None:
    """RAM evicts blocks of the plan while later blocks are read ahead."""
    for seed in range(rounds(10, 80)):
        chance = random.Random(seed)
        chats = [[number] * chance.randrange(30, 120) for number in range(1, 4)]
        resumed = Resumed(
            *chats,
            ram_bytes=chance.randrange(24) * (BLOCK_BYTES + 300),
            fetch_bytes=int(fetch_blocks * BLOCK_BYTES),
            parallel=chance.choice([1, 1, 2, 3]),
        )
        harness = resumed.harness
        harness.kv.budget.step_bytes = chance.choice([1, BLOCK_BYTES, 3 * BLOCK_BYTES])
        for _ in range(12):
            chat = chance.choice(chats)
            harness.submit([*chat[: chance.randrange(10, len(chat))], 9], max_tokens=2)
            for _ in range(chance.randrange(8)):
                if chance.random() < 0.7:
                    harness.take_events()
                harness.scheduler.step()
        finish(harness, resumed.clock)
        assert all(reply.ended for reply in harness.replies.values()), seed
