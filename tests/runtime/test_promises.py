"""Promises to clients hold: state stays in memory, deleted, pinned or bounded as promised."""

from __future__ import annotations

from pathlib import Path

from rekindle.chat.prompt import Prompt
from rekindle.errors import NoRoomForPins
from rekindle.kvcache.entries.entries import Draft, Entries
from rekindle.kvcache.entries.entry import Clock
from rekindle.kvcache.entries.index import MAX_NAMES
from rekindle.kvcache.entries.retention import EntryLimits
from rekindle.kvcache.store import Store
from rekindle.kvcache.tiers.ram import RamTier
from rekindle.protocol.admin import DeleteEntry, IndexPrompt
from rekindle.protocol.requests import Names, Prepare
from rekindle.tokens import Tokens
from tests.support.fake import FakeEngine
from tests.support.harness import Reply, RuntimeHarness

PROMPT = list(range(100, 140))
ROOT = b"r" * 32


def key_of(reply: Reply) -> str:
    key = reply.finished.cache.new_cache_key
    assert key is not None
    return key


def on_disk(harness: RuntimeHarness) -> set[int]:
    """All tokens of the blocks on disk."""
    harness.flush()
    return {token for block in harness.store if block.is_persistent for token in block.tokens}


def test_memory_only_state_is_not_written_for_another_turn_with_the_same_prefix(
    tmp_path: Path,
) -> None:
    harness = RuntimeHarness(FakeEngine(), folder=tmp_path, idle_tokens=0)
    harness.ask([1, 2, 3, 4, *range(700, 716)], names=Names(in_memory=True))
    harness.ask([1, 2, 3, 4, *range(800, 816)])
    harness.store.write_back.write_everything()
    assert not {*range(700, 716)} & on_disk(harness)
    harness.close()


def test_state_shared_on_the_device_is_written_for_a_turn_that_wants_it_durable(
    tmp_path: Path,
) -> None:
    engine = FakeEngine()
    harness = RuntimeHarness(engine, folder=tmp_path)
    first = harness.ask(PROMPT, names=Names(in_memory=True))
    harness.offload()
    second = harness.ask([*first.turn.tokens, 7, 8], names=Names(session_id="s"))
    harness.close()
    engine.sequences.reset()
    again = RuntimeHarness(engine, folder=tmp_path)
    assert again.ask([*second.turn.tokens, 9]).reused == len(second.turn.tokens) - 1
    again.close()


def test_a_deleted_entry_stays_deleted_however_it_was_used(tmp_path: Path) -> None:
    harness = RuntimeHarness(FakeEngine(), folder=tmp_path)
    reply = harness.ask(PROMPT, names=Names(return_cache_key=True))
    harness.ask(PROMPT, names=Names(in_memory=True))
    harness.administer(DeleteEntry(key_of(reply)))
    harness.close()
    again = RuntimeHarness(FakeEngine(), folder=tmp_path)
    assert len(again.entries) == 0
    again.close()


def test_deleting_an_old_key_keeps_the_conversation_that_continued_it() -> None:
    harness = RuntimeHarness(FakeEngine())
    naming = Names(return_cache_key=True)
    first = harness.ask(PROMPT, names=naming)
    second = harness.ask([*first.turn.tokens, 7, 8], names=naming)
    harness.administer(DeleteEntry(key_of(first)))
    goes_on = harness.ask([*second.turn.tokens, 9], names=Names(cache_key=key_of(second)))
    assert goes_on.finished.cache.status == "hit"


def test_a_restarted_turn_is_counted_once() -> None:
    harness = RuntimeHarness(FakeEngine(break_steps={2}))
    harness.ask(list(range(200)))
    assert sum(harness.pipeline.statuses[harness.namespace()].values()) == 1


# -- pins --


def pin_until_refused(harness: RuntimeHarness, salt: bytes = b"") -> int:
    """Number of prompts of 40 tokens that can be pinned before any is computed."""
    asked = IndexPrompt(messages=[], prepare=Prepare(pinned=True, ttl_s=None))
    for number in range(20):
        prompt = Prompt(Tokens.of([number] * 40))
        try:
            harness.administer(asked, salt=salt, prompt=prompt)
        except NoRoomForPins:
            return number
    raise AssertionError("there was room for all")


def test_pins_count_before_they_are_computed() -> None:
    harness = RuntimeHarness(FakeEngine(), ram_bytes=40_000)
    assert 1 <= pin_until_refused(harness) <= 40_000 // (5 * 1536)


def test_pinning_the_same_prompt_again_takes_no_more_room() -> None:
    harness = RuntimeHarness(FakeEngine(), ram_bytes=16_000)
    once = harness.ask(PROMPT, prepare=Prepare(pinned=True, ttl_s=None))
    again = harness.ask(PROMPT, prepare=Prepare(pinned=True, ttl_s=None))
    assert key_of(once) == key_of(again)


def test_one_tenant_cannot_pin_the_share_of_others() -> None:
    harness = RuntimeHarness(FakeEngine(), ram_bytes=40_000)
    harness.ask([1, 2, 3], salt=b"other")
    assert pin_until_refused(harness, b"greedy") * 5 * 1536 <= 20_000


# -- limits --


def entries(limit_bytes: int) -> Entries:
    return Entries(
        Store(block_tokens=8, tiers=[RamTier(0)]), Clock(), None, EntryLimits(limit_bytes)
    )


def test_an_entry_keeps_only_its_newest_names() -> None:
    known = entries(1 << 20)
    for number in range(3 * MAX_NAMES):
        known.remember(
            Draft(
                namespace=ROOT,
                tokens=Tokens.of([1]),
                text=b"",
                names=(("session_id", str(number)),),
            )
        )
    [entry] = known.of(None)
    assert len(entry.names) == MAX_NAMES
    assert known.by_name(ROOT, ("session_id", str(3 * MAX_NAMES - 1))) is entry
    assert known.by_name(ROOT, ("session_id", "0")) is None


def test_many_entries_of_one_tenant_evict_none_of_another() -> None:
    known = entries(100_000)
    other = b"o" * 32
    mine = known.remember(Draft(namespace=ROOT, tokens=Tokens.of([1]), text=b"", keyed=True))
    for number in range(500):
        known.remember(Draft(namespace=other, tokens=Tokens.of([number]), text=b"", keyed=True))
    assert mine is not None
    assert known.by_key(ROOT, mine.key) is mine
    assert 10 < len(known) < 50


def test_an_entry_larger_than_the_budget_is_refused_and_evicts_nothing() -> None:
    known = entries(100_000)
    kept = known.remember(Draft(namespace=ROOT, tokens=Tokens.of([1]), text=b"", keyed=True))
    assert known.remember(Draft(namespace=ROOT, tokens=Tokens(bytes(200_000)), text=b"")) is None
    assert known.of(None) == [kept]


def test_only_as_many_turns_fetch_state_as_may_run(tmp_path: Path) -> None:
    engine = FakeEngine()
    harness = RuntimeHarness(engine, folder=tmp_path, idle_tokens=0)
    prompts = [[number] * 40 for number in range(20)]
    for prompt in prompts:
        harness.ask(prompt)
    harness.close()
    engine.sequences.reset()
    again = RuntimeHarness(engine, folder=tmp_path, idle_tokens=0, ram_bytes=0, parallel=2)
    replies = [again.submit(prompt) for prompt in prompts]
    again.scheduler.step()
    assert sum(reply.is_fetching for reply in replies) <= 2
    again.run(*replies)
    assert {reply.reused for reply in replies} == {39}
    again.close()
