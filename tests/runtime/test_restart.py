"""Computed state survives restarts and crashes of the runtime on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.protocol.admin import EntryInfo, Flush
from rekindle.protocol.requests import Names, Prepare
from tests.support.fake import CELL_BYTES, FakeEngine
from tests.support.harness import RuntimeHarness

FIRST = list(range(100, 140))


def converse(harness: RuntimeHarness, turns: int, tokens: list[int]) -> list[int]:
    """Turns that each add a question to the conversation."""
    for turn in range(turns):
        reply = harness.ask(tokens)
        tokens = [*tokens, *reply.tokens, 200 + turn, 300 + turn, 400 + turn]
    return tokens


def test_a_conversation_resumes_after_a_restart_with_the_same_answers(tmp_path: Path) -> None:
    engine = FakeEngine()
    harness = RuntimeHarness(engine, folder=tmp_path)
    tokens = converse(harness, 5, FIRST)
    harness.close()
    engine.sequences.reset()

    again = RuntimeHarness(engine, folder=tmp_path)
    before = engine.counts.computed_tokens
    reply = again.ask(tokens)
    cold = RuntimeHarness(FakeEngine()).ask(tokens)

    assert reply.tokens == cold.tokens
    assert reply.finished.cache.tier == "disk"
    assert reply.finished.cache.status == "hit"
    assert len(tokens) - reply.reused == 4  # three new tokens and the last sampled one
    assert engine.counts.computed_tokens - before == 4 + len(reply.tokens) - 1
    again.close()


def test_stored_state_survives_a_crash(tmp_path: Path) -> None:
    engine = FakeEngine()
    harness = RuntimeHarness(engine, folder=tmp_path, idle_tokens=0)
    tokens = converse(harness, 3, FIRST)
    harness.flush()
    stored = max(block.stop for block in harness.store if block.stored)
    assert harness.disk is not None
    harness.disk.folder.close()  # a dead process releases the folder
    engine.sequences.reset()

    again = RuntimeHarness(engine, folder=tmp_path)
    assert again.ask(tokens).reused == stored > len(FIRST)
    again.close()


def test_a_second_request_for_blocks_that_are_being_read_waits_for_them(tmp_path: Path) -> None:
    engine = FakeEngine()
    harness = RuntimeHarness(engine, folder=tmp_path, idle_tokens=0)
    harness.ask(FIRST)
    harness.close()
    engine.sequences.reset()
    again = RuntimeHarness(engine, folder=tmp_path, idle_tokens=0)
    replies = [again.submit(FIRST) for _ in range(4)]
    again.run(*replies)
    assert again.disk is not None
    assert again.disk.counts.read_bytes <= 16 * (len(FIRST) + 8)
    assert {reply.reused for reply in replies} == {len(FIRST) - 1}
    again.close()


def test_names_survive_a_restart_and_lead_to_the_same_key(tmp_path: Path) -> None:
    engine = FakeEngine()
    harness = RuntimeHarness(engine, folder=tmp_path)
    reply = harness.ask(FIRST, names=Names(session_id="s", return_cache_key=True))
    key = reply.finished.cache.new_cache_key
    assert key is not None
    harness.close()
    engine.sequences.reset()

    again = RuntimeHarness(engine, folder=tmp_path)
    tokens = [*FIRST, *reply.tokens, 7]
    report = again.ask(tokens, names=Names(session_id="s")).finished.cache
    assert (report.status, report.cache_key) == ("hit", key)
    assert again.entries.by_key(again.namespace(), key) is not None
    again.close()


def test_a_turn_writes_only_its_new_tokens(tmp_path: Path) -> None:
    engine = FakeEngine()
    harness = RuntimeHarness(engine, folder=tmp_path, idle_tokens=0)
    converse(harness, 10, FIRST)
    harness.store.write_back.write_everything()
    harness.flush()
    assert harness.disk is not None
    written = harness.disk.counts.written_bytes
    final = sum(path.stat().st_size for path in (harness.disk.folder.path / "blocks").iterdir())
    assert written <= 1.1 * final
    harness.close()


def test_twenty_conversations_on_one_system_prompt_store_it_once(tmp_path: Path) -> None:
    engine = FakeEngine(context_tokens=1024, pool_tokens=2048)
    harness = RuntimeHarness(engine, folder=tmp_path, idle_tokens=0)
    system = [10 + number % 900 for number in range(500)]
    states = set()
    for number in range(20):
        tokens = harness.ask([*system, *([600 + number] * 12)]).turn.tokens.ids[:-1]
        states |= {tuple(tokens[: stop + 1]) for stop in range(len(tokens))}
    harness.store.write_back.write_everything()
    harness.flush()
    assert harness.disk is not None
    stored = sum(block.size_bytes for block in harness.store if block.stored)
    assert stored <= 1.1 * CELL_BYTES * len(states)  # each token is stored once per prefix
    harness.close()


@pytest.mark.parametrize(
    ("policy", "named", "written"),
    [
        ("always", False, True),
        ("named", False, False),
        ("named", True, True),
        ("likely", False, False),
        ("likely", True, True),
        ("on-evict", True, False),
    ],
)
def test_the_write_policy_decides_what_is_written_after_a_turn(
    tmp_path: Path, policy: str, named: bool, written: bool
) -> None:
    harness = RuntimeHarness(FakeEngine(), folder=tmp_path, idle_tokens=0, cache_write=policy)
    harness.ask(FIRST, names=Names(session_id="s") if named else None)
    harness.flush()
    assert any(block.stored for block in harness.store) is written
    harness.close()
    again = RuntimeHarness(FakeEngine(), folder=tmp_path)
    assert (len(again.store) > 0) is (written or policy in ("likely", "on-evict"))
    again.close()


def test_memory_only_state_is_never_written(tmp_path: Path) -> None:
    harness = RuntimeHarness(FakeEngine(), folder=tmp_path)
    harness.ask(FIRST, names=Names(session_id="s", in_memory=True))
    harness.close()
    again = RuntimeHarness(FakeEngine(), folder=tmp_path)
    assert len(again.store) == len(again.entries) == 0
    again.close()


def test_blocks_evicted_from_ram_to_disk_return_to_ram_when_used(tmp_path: Path) -> None:
    engine = FakeEngine()
    harness = RuntimeHarness(engine, folder=tmp_path, idle_tokens=0, ram_bytes=20_000)
    prompts = [[100 + number] * 40 for number in range(8)]
    cold = [harness.ask(prompt).tokens for prompt in prompts]
    harness.flush()  # otherwise blocks in the write queue are still in memory
    before = engine.counts.computed_tokens
    warm = [harness.ask(prompt) for prompt in prompts]
    assert [reply.tokens for reply in warm] == cold
    assert {reply.reused for reply in warm} == {39}
    assert "disk" in {reply.finished.cache.tier for reply in warm}
    assert (
        engine.counts.computed_tokens - before == 8 * 8
    )  # the last prompt token of each, and the replies
    harness.close()


def test_a_pinned_prompt_stays_on_disk_when_a_longer_conversation_covers_it(
    tmp_path: Path,
) -> None:
    harness = RuntimeHarness(FakeEngine(), folder=tmp_path, idle_tokens=0)
    prepared = harness.ask(FIRST[:5], prepare=Prepare(pinned=True, ttl_s=None))
    key = prepared.finished.cache.new_cache_key
    assert key is not None
    info = harness.administer(Flush(key))
    assert isinstance(info, EntryInfo)
    assert info.stored_tokens == 5
    harness.ask([*FIRST[:5], 1, 2, 3])
    harness.flush()
    assert harness.disk is not None
    harness.disk.folder.close()  # simulate a crash
    again = RuntimeHarness(FakeEngine(), folder=tmp_path)
    assert again.ask([*FIRST[:5], 9], names=Names(cache_key=key)).finished.cache.status == "hit"
    again.close()


def test_a_server_that_is_never_idle_writes_to_disk(tmp_path: Path) -> None:
    harness = RuntimeHarness(FakeEngine(), folder=tmp_path, idle_tokens=0)
    assert harness.disk is not None
    harness.disk.give_way(busy=True)
    harness.ask(FIRST)
    while not any(block.stored for block in harness.store):
        harness.take_events(wait=True)
    harness.close()


def test_busy_turns_do_not_delay_a_request_that_waits_for_the_disk(tmp_path: Path) -> None:
    harness = RuntimeHarness(FakeEngine(), folder=tmp_path, idle_tokens=0)
    assert harness.disk is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rekindle.kvcache.disk.writer.PATIENCE_S", 3600.0)
        harness.disk.give_way(busy=True)
        harness.ask(FIRST)
        harness.flush()
        assert any(block.stored for block in harness.store)
        harness.close()
