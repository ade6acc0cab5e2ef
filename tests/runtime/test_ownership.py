"""Every stored block is used by a listed entry, or it is freed. Deleting every entry leaves nothing
in any tier, in the engine's memory, in encoded images or in files (decision 45)."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rekindle.kvcache.disk.check import check
from rekindle.protocol.admin import (
    CollectExpired,
    DeleteEntry,
    EntryList,
    GetStats,
    ListEntries,
    RemoveOld,
    RemoveSession,
    Stats,
    StoreDocument,
)
from rekindle.protocol.requests import GenerateRequest, Names, Picture, Prepare
from tests.stress.storage_harness import StorageHarness, load
from tests.support.fake import AsciiTokenizer, FakeEngine
from tests.support.harness import GREEDY, Reply, RuntimeHarness
from tests.support.pictures import drawn
from tests.support.rounds import rounds

A, B = list(range(100, 180)), list(range(300, 380))


@pytest.fixture(params=["in the engine", "in the store", "checkpoints", "parked"])
def harness(request: pytest.FixtureRequest) -> Iterator[RuntimeHarness]:
    """Where state is after a turn: it stays in the engine, or it is exported at once."""
    kinds: dict[str, dict[str, Any]] = {
        "checkpoints": {"can_truncate": False},
        "parked": {"park_tokens": 400},
    }
    options = kinds.get(request.param, {})
    idle_tokens = 0 if request.param == "in the store" else 1 << 20
    built = RuntimeHarness(FakeEngine(**options), idle_tokens=idle_tokens)
    yield built
    built.close()


def listed(harness: RuntimeHarness) -> list[str]:
    """The keys of all entries, as an admin sees them."""
    found = harness.administer(ListEntries(limit=1000), admin=True)
    assert isinstance(found, EntryList)
    return [entry.cache_key for entry in found.entries]


def all_state_is_listed(harness: RuntimeHarness) -> None:
    """Every block is on the path of an entry, and every idle sequence belongs to one."""
    assert [block for block in harness.store.conversations.unreached() if block is not None] == []
    entries = set(harness.entries.of(None))
    assert all(idle.owner in entries for idle in harness.kv.idle)


def nothing_is_left(harness: RuntimeHarness) -> None:
    assert listed(harness) == []
    assert len(harness.store) == 0
    assert len(harness.kv.idle) == 0
    engine = harness.engine
    assert isinstance(engine, FakeEngine)
    assert engine.open_sequences == 0
    stats = harness.administer(GetStats(), admin=True)
    assert isinstance(stats, Stats)
    held = (stats.ram_bytes, stats.disk_bytes, stats.unique_bytes, stats.logical_bytes)
    assert held == (0, 0, 0, 0)
    assert stats.picture_ram_bytes == 0
    assert harness.entries.retention.used_bytes == 0
    assert not harness.entries.index.pictures


def delete_everything(harness: RuntimeHarness) -> None:
    all_state_is_listed(harness)
    for key in listed(harness):
        harness.administer(DeleteEntry(key), admin=True)
        assert harness.runtime.input_processor.recent_chats.used_bytes == 0
    nothing_is_left(harness)


def names_of(kind: str) -> Names:
    return {
        "number": Names(session_number=5),
        "session": Names(session_id="5"),
        "message": Names(message_id="5"),
    }[kind]


# -- names that are used again ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["number", "session", "message"])
def test_a_session_that_is_used_for_another_conversation_frees_the_first(
    harness: RuntimeHarness, kind: str
) -> None:
    harness.ask(A, names=names_of(kind))
    harness.ask(B, names=names_of(kind))
    harness.offload()
    all_state_is_listed(harness)
    harness.administer(RemoveSession(5 if kind == "number" else "5"))
    harness.administer(RemoveOld(0))
    harness.administer(CollectExpired())
    nothing_is_left(harness)
    assert harness.ask(A).finished.cache.status == "miss"


@pytest.mark.parametrize("deleted", ["before the restart", "after the restart"])
@pytest.mark.parametrize("kind", ["number", "session"])
def test_a_deleted_session_does_not_return_after_a_restart(
    tmp_path: Path, kind: str, deleted: str
) -> None:
    harness = RuntimeHarness(FakeEngine(), folder=tmp_path)
    harness.ask(A, names=names_of(kind))
    harness.ask(B, names=names_of(kind))
    if deleted == "before the restart":
        harness.administer(RemoveSession(5 if kind == "number" else "5"))
    harness.close()

    again = RuntimeHarness(FakeEngine(), folder=tmp_path)
    if deleted == "after the restart":
        again.administer(RemoveSession(5 if kind == "number" else "5"))
    nothing_is_left(again)
    assert again.ask(A, max_tokens=1).reused == 0
    delete_everything(again)
    again.close()
    assert files(tmp_path) == []


def test_deleted_text_is_in_no_file_and_does_not_return_with_a_backup(tmp_path: Path) -> None:
    live, killed = tmp_path / "live", tmp_path / "killed"
    harness = RuntimeHarness(FakeEngine(), folder=live)
    harness.ask(A, names=Names(session_id="5", entry_key="conv_1"))
    harness.administer(StoreDocument(key="conv_1", content=b"secret words"))
    assert harness.disk is not None
    harness.disk.back_up({})
    harness.flush()
    [index] = live.glob("*/index.db")
    assert b"secret words" in index.with_name("index.db.bak").read_bytes()
    harness.administer(DeleteEntry("conv_1"))
    found = [each for each in live.rglob("*") if each.is_file()]
    assert not any(b"secret words" in each.read_bytes() for each in found)
    shutil.copytree(live, killed)
    harness.close()
    (killed / index.relative_to(live)).unlink()
    again = RuntimeHarness(FakeEngine(), folder=killed)
    nothing_is_left(again)
    again.close()


def test_an_index_without_a_backup_is_backed_up_within_a_minute(tmp_path: Path) -> None:
    harness = RuntimeHarness(FakeEngine(), folder=tmp_path)
    harness.ask(A, names=Names(session_id="5"))
    harness.ask(B)
    assert harness.disk is not None
    harness.disk.back_up({})
    harness.flush()
    harness.administer(RemoveSession("5"))
    assert harness.disk.lacks_backup
    for _ in harness.storage.upkeep():
        pass
    harness.flush()
    assert list(tmp_path.glob("*/index.db.bak"))
    harness.close()


def test_conversations_that_share_a_prompt_cache_key_keep_their_state(
    harness: RuntimeHarness,
) -> None:
    shared = Names(prompt_cache_key="agents")
    first = harness.ask(A, names=shared)
    harness.ask(B, names=shared)
    harness.offload()
    assert len(listed(harness)) == 2
    again = harness.ask([*first.turn.tokens, 1, 2], names=shared)
    assert again.reused == len(first.turn.tokens) - 1
    delete_everything(harness)


def test_a_continued_conversation_is_one_entry_and_keeps_its_state(
    harness: RuntimeHarness,
) -> None:
    for names in (Names(prompt_cache_key="p"), Names(session_id="s"), Names()):
        first = harness.ask(A, names=names)
        harness.offload()
        second = harness.ask([*first.turn.tokens, 1, 2], names=names)
        harness.offload()
        assert second.reused == len(first.turn.tokens) - 1
        assert len(listed(harness)) == 1
        delete_everything(harness)


def test_an_edited_session_keeps_what_both_versions_share(harness: RuntimeHarness) -> None:
    names = Names(session_id="s", return_cache_key=False)
    harness.ask([*A, *B], names=names)
    harness.ask([*A, 1, 2, 3], names=names)
    harness.offload()
    assert len(listed(harness)) == 1
    stored = sum(len(block.tokens) for block in harness.store)
    assert stored < len(A) + len(B)
    delete_everything(harness)


def test_an_entry_with_a_key_outlives_its_session_name(harness: RuntimeHarness) -> None:
    names = Names(session_id="s", return_cache_key=True)
    key = harness.ask(A, names=names).finished.cache.new_cache_key
    harness.ask(B, names=Names(session_id="s"))
    assert key in listed(harness)
    report = harness.ask([*A, 1], names=Names(cache_key=key)).finished.cache
    assert report.reused_tokens >= len(A) - 1 or not harness.capabilities.can_truncate
    delete_everything(harness)


# -- turns without an entry ------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 3, 6, 12])
def test_a_cancelled_turn_leaves_a_listed_entry(harness: RuntimeHarness, steps: int) -> None:
    reply = harness.submit(A, max_tokens=30)
    for _ in range(steps):
        harness.scheduler.step()
    harness.cancel(reply)
    harness.offload()
    assert len(listed(harness)) <= 1
    delete_everything(harness)


def test_the_state_of_a_cancelled_turn_is_reused_and_its_entry_superseded(
    harness: RuntimeHarness,
) -> None:
    text = " ".join(map(str, A))
    request = GenerateRequest(turn=99, prompt=text, max_tokens=30, sampling=GREEDY)
    reply = harness.take_turn(harness.encode_one(request))
    while reply.turn.generated_tokens < 3:
        harness.scheduler.step()
    harness.cancel(reply)
    assert len(listed(harness)) == 1
    again = harness.ask_text(text, max_tokens=30)
    assert again.reused > 0
    harness.offload()
    assert len(listed(harness)) == 1
    delete_everything(harness)


def test_a_turn_that_is_too_large_to_be_remembered_leaves_nothing(
    harness: RuntimeHarness,
) -> None:
    harness.entries.budget.limit_bytes = 100
    for exact in (False, True):
        harness.ask(A, exact=exact)
        harness.offload()
        nothing_is_left(harness)


def test_an_entry_that_does_not_fit_takes_its_state_along(harness: RuntimeHarness) -> None:
    harness.entries.budget.limit_bytes = 3 * 2600
    for number in range(8):
        harness.ask([number + 10, *A])
        harness.offload()
        all_state_is_listed(harness)
    assert 0 < len(listed(harness)) < 8
    delete_everything(harness)


def test_preempted_turns_keep_their_state_until_they_end() -> None:
    engine = FakeEngine(pool_tokens=300, context_tokens=300)
    harness = RuntimeHarness(engine, idle_tokens=0)
    replies = [harness.submit([number + 10] * 10, max_tokens=200) for number in range(3)]
    for _ in range(1000):
        harness.scheduler.step()
        if harness.kv.counts.preemptions:
            break
    waiting = next(reply for reply in replies if not reply.turn.sequence)
    assert waiting.turn.is_started
    harness.cancel(waiting)
    harness.run(*[reply for reply in replies if reply is not waiting])
    harness.offload()
    delete_everything(harness)


def test_a_reply_that_was_cut_leaves_no_block_behind_its_entry(harness: RuntimeHarness) -> None:
    """The sequence holds tokens after a stop string that the entry does not have."""
    text = " ".join(map(str, A))
    uncut = harness.ask_text(text, max_tokens=40)
    words = uncut.text.split()
    delete_everything(harness)
    reply = harness.ask_text(text, max_tokens=40, stop=[f"{words[-2]} {words[-1][0]}"])
    assert reply.finished.reason == "stop"
    harness.offload()
    delete_everything(harness)


# -- exact turns, other precisions -----------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"exact": True},
        {"kv_bits": 8},
        {"kv_bits": 8, "kv_quantization_start": 48},
        {"kv_bits": 4, "exact": True},
    ],
    ids=str,
)
def test_state_of_every_kind_is_freed_with_its_entries(
    harness: RuntimeHarness, options: dict[str, Any]
) -> None:
    first = harness.ask(A, **options)
    harness.ask([*first.turn.tokens, *B], **options)
    cancelled = harness.submit([*A[:40], *B], max_tokens=30, **options)
    for _ in range(4):
        harness.scheduler.step()
    harness.cancel(cancelled)
    harness.offload()
    delete_everything(harness)


def test_a_conversation_that_changes_its_precision_frees_the_earlier_state(
    harness: RuntimeHarness,
) -> None:
    for options in ({}, {"kv_bits": 8}, {}, {"kv_bits": 4}):
        harness.ask(A, names=Names(session_id="s"), **options)
        harness.offload()
        all_state_is_listed(harness)
    assert len(listed(harness)) == 1
    delete_everything(harness)


def test_deleting_a_longer_conversation_keeps_the_state_of_a_shorter_one(
    harness: RuntimeHarness,
) -> None:
    keyed = Names(return_cache_key=True)
    first = harness.ask(A, names=keyed)
    second = harness.ask([*first.turn.tokens, *B], names=keyed)
    key = second.finished.cache.new_cache_key
    assert key is not None
    harness.administer(DeleteEntry(key))
    all_state_is_listed(harness)
    again = harness.ask([*first.turn.tokens, 1, 2])
    assert again.reused > len(A) // 2 or not harness.capabilities.can_truncate
    delete_everything(harness)


# -- files -----------------------------------------------------------------------------------------


def files(folder: Path) -> list[Path]:
    """The files of blocks and images."""
    return sorted([*folder.glob("*/blocks/*"), *folder.glob("*/pictures/*")])


def test_blocks_without_an_entry_are_listed_after_a_restart(tmp_path: Path) -> None:
    harness = RuntimeHarness(FakeEngine(), folder=tmp_path)
    first = harness.ask(A)
    harness.ask([*A, *B], kv_bits=8)
    harness.close()
    [report] = check(tmp_path, repair=False)
    assert report.unreached == 0
    for index in tmp_path.glob("*/index*"):
        index.unlink()
    [report] = check(tmp_path, repair=True)
    assert report.unreached == report.blocks > 0

    again = RuntimeHarness(FakeEngine(), folder=tmp_path)
    assert len(listed(again)) == 2
    all_state_is_listed(again)
    reply = again.ask([*first.turn.tokens, 1, 2])
    assert reply.reused == len(first.turn.tokens) - 1
    assert len(listed(again)) == 2  # the continued one is superseded
    again.close()

    last = RuntimeHarness(FakeEngine(), folder=tmp_path)
    delete_everything(last)
    last.close()
    assert files(tmp_path) == []
    [report] = check(tmp_path, repair=False)
    assert (report.blocks, report.unreached, report.findings) == (0, 0, ())


def test_state_without_an_entry_is_freed_if_there_is_no_room_for_one(tmp_path: Path) -> None:
    harness = StorageHarness(FakeEngine(), load(tmp_path))
    for number in range(20):
        harness.ask([number + 10, *A])
    harness.close()
    for index in tmp_path.glob("*/index*"):
        index.unlink()
    again = StorageHarness(FakeEngine(), load(tmp_path))
    again.entries.budget.limit_bytes = 5 * 2600
    while again.storage.is_settled is False:
        again.take_events(wait=True)
    all_state_is_listed(again)
    delete_everything(again)
    again.close()
    assert files(tmp_path) == []


def test_a_turn_supersedes_an_entry_whose_blocks_are_still_being_loaded(tmp_path: Path) -> None:
    harness = RuntimeHarness(FakeEngine(), folder=tmp_path)
    harness.ask(A, names=Names(session_id="s"))
    harness.close()
    again = StorageHarness(FakeEngine(), load(tmp_path))
    again.ask(B, names=Names(session_id="s"))
    all_state_is_listed(again)
    delete_everything(again)
    again.close()


# -- images ----------------------------------------------------------------------------------------


def seeing() -> FakeEngine:
    engine = FakeEngine(sees=True)
    engine.tokenizer = AsciiTokenizer()
    return engine


def look_at(harness: RuntimeHarness, picture: Picture, text: str, **request: Any) -> Reply:
    content = [{"type": "text", "text": text}, {"type": "image"}]
    return harness.ask_chat([{"role": "user", "content": content}], [picture], **request)


def test_vectors_are_freed_with_the_last_entry_that_has_the_image(tmp_path: Path) -> None:
    harness = RuntimeHarness(seeing(), folder=tmp_path)
    look_at(harness, drawn(1), "a")
    look_at(harness, drawn(1), "b")
    first, second = listed(harness)
    harness.administer(DeleteEntry(first))
    assert harness.pictures.used_bytes > 0
    harness.administer(DeleteEntry(second))
    nothing_is_left(harness)
    harness.close()
    assert files(tmp_path) == []


def test_vectors_of_a_turn_without_an_entry_are_freed(tmp_path: Path) -> None:
    harness = RuntimeHarness(seeing(), folder=tmp_path)
    harness.entries.budget.limit_bytes = 100
    look_at(harness, drawn(1), "a")
    nothing_is_left(harness)
    harness.close()
    assert files(tmp_path) == []


def test_a_restart_keeps_the_files_of_images_in_entries_and_removes_others(tmp_path: Path) -> None:
    harness = RuntimeHarness(seeing(), folder=tmp_path)
    look_at(harness, drawn(1), "a")
    look_at(harness, drawn(2), "b", names=Names(session_id="s"))
    harness.close()
    [folder] = tmp_path.glob("*/pictures")
    kept = sorted(folder.iterdir())
    assert len(kept) == 2
    (folder / ("0" * len(kept[0].name))).write_bytes(b"of a process that was killed")

    again = RuntimeHarness(seeing(), folder=tmp_path)
    again.close()
    assert sorted(folder.iterdir()) == kept
    last = RuntimeHarness(seeing(), folder=tmp_path)
    last.administer(RemoveSession("s"))
    last.close()
    assert len(list(folder.iterdir())) == 1


def test_vectors_that_arrive_after_their_entry_was_deleted_are_not_kept(tmp_path: Path) -> None:
    harness = RuntimeHarness(seeing(), folder=tmp_path)
    look_at(harness, drawn(1), "a", names=Names(session_id="s"))
    harness.close()
    again = RuntimeHarness(seeing(), folder=tmp_path)
    reply = again.submit_chat(
        [{"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "image"}]}],
        [drawn(1)],
    )
    while not reply.turn.waits_for_vectors:
        again.scheduler.step()
    again.cancel(reply)
    for entry in again.entries.of(None):
        again.entries.remove(entry)
    again.take_events(wait=True)  # the vectors
    nothing_is_left(again)
    again.close()
    assert files(tmp_path) == []


# -- anything at all -------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("seed", range(rounds(4, 60)))
def test_whatever_happens_deleting_every_entry_leaves_nothing(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    options: dict[str, Any] = {"can_truncate": bool(seed % 2), "pool_tokens": 1024}
    budgets: dict[str, Any] = {
        "idle_tokens": chance.choice([0, 200, 1 << 20]),
        "ram_bytes": chance.choice([6_000, 1 << 30]),
    }

    def opened() -> RuntimeHarness:
        harness = RuntimeHarness(FakeEngine(**options), folder=tmp_path, **budgets)
        harness.entries.budget.limit_bytes = chance.choice([4 * 2600, 1 << 20])
        return harness

    harness, tokens = opened(), [A]
    for number in range(40):
        action = chance.random()
        if action < 0.06:
            harness.close()
            harness = opened()
        elif action < 0.2 and (keys := listed(harness)):
            harness.administer(DeleteEntry(chance.choice(keys)), admin=True)
        elif action < 0.3:
            reply = harness.submit(_prompt(chance, tokens), max_tokens=30, **_request(chance))
            for _ in range(chance.randrange(12)):
                harness.scheduler.step()
            harness.cancel(reply)
        else:
            replies = [
                harness.submit(_prompt(chance, tokens), **_request(chance))
                for _ in range(chance.randint(1, 3))
            ]
            harness.run(*replies)
            tokens.append(list(replies[0].turn.tokens))
        if number % 5 == 0:
            harness.offload()
            all_state_is_listed(harness)
    delete_everything(harness)
    harness.close()
    assert files(tmp_path) == []


def _prompt(chance: random.Random, known: list[list[int]]) -> list[int]:
    before = chance.choice(known)[: chance.choice([0, 30, 64, 400])]
    return [*before[:400], *(chance.randrange(10, 900) for _ in range(chance.randint(1, 60)))]


def _request(chance: random.Random) -> dict[str, Any]:
    names = chance.choice(
        [
            Names(),
            Names(session_id="s"),
            Names(session_number=5, prompt_cache_key="p"),
            Names(prompt_cache_key="p"),
            Names(return_cache_key=True, message_id="m"),
            Names(in_memory=True),
        ]
    )
    more: dict[str, Any] = chance.choice(
        [{}, {}, {"exact": True}, {"kv_bits": 8}, {"kv_bits": 8, "kv_quantization_start": 48}]
    )
    if chance.random() < 0.1:
        more["prepare"] = Prepare()
    return {"names": names, **more}
