"""Lists and statistics are cheap, and only its own tenant sees the text of an entry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rekindle.kvcache.block import chain
from rekindle.protocol.admin import (
    AdminOp,
    AdminRequest,
    AdminResult,
    EntryInfo,
    EntryList,
    GetStats,
    ListEntries,
    RemoveOld,
    ShowEntry,
    Stats,
)
from rekindle.protocol.requests import Names
from rekindle.runtime.model_process import PIECE_ENTRIES
from tests.chat.templates import CHATML
from tests.support.conversations import Conversations
from tests.support.effort import calls_made
from tests.support.fake import FakeEngine
from tests.support.harness import RuntimeHarness


def harness_with(tokens: int, *, entries: int = 1, can_truncate: bool = True) -> RuntimeHarness:
    """A runtime with conversations of this many tokens each."""
    engine = FakeEngine(
        context_tokens=1 << 16, pool_tokens=1 << 17, block_tokens=8, can_truncate=can_truncate
    )
    harness = RuntimeHarness(engine, idle_tokens=0)
    for number in range(entries):
        prompt = [10 + number % 900, 10 + number // 900, *(token % 900 for token in range(tokens))]
        harness.ask(prompt, max_tokens=1, names=Names(session_id=str(number)))
    return harness


def stats_of(harness: RuntimeHarness, salt: bytes = b"", *, admin: bool = False) -> Stats:
    stats = harness.administer(GetStats(), salt=salt, admin=admin)
    assert isinstance(stats, Stats)
    return stats


def test_the_work_for_stats_does_not_grow_with_the_number_of_blocks() -> None:
    few, many = harness_with(tokens=16), harness_with(tokens=16_000)
    assert len(many.store) > 100 * len(few.store)
    assert calls_made(lambda: stats_of(many)) <= calls_made(lambda: stats_of(few)) + 10


def test_the_work_for_a_scrape_does_not_grow_with_the_number_of_entries() -> None:
    few, many = harness_with(tokens=16), harness_with(tokens=16, entries=200)
    scrape = GetStats(of_entries=False)
    assert calls_made(lambda: many.administer(scrape, admin=True)) <= (
        calls_made(lambda: few.administer(scrape, admin=True)) + 10
    )


@pytest.mark.parametrize("can_truncate", [True, False])
def test_running_counts_equal_a_full_count(can_truncate: bool) -> None:
    harness = harness_with(tokens=100, entries=30, can_truncate=can_truncate)
    for salt in (b"one", b"two"):
        for length in (10, 30, 60):
            harness.ask(list(range(100, 100 + length)), salt=salt, names=Names(session_id="s"))
    for entry in harness.entries.of(None)[::3]:
        harness.entries.remove(entry)
    for salt, admin in ((b"", False), (b"one", False), (b"nobody", False), (b"", True)):
        view = None if admin else harness.namespace(salt)
        blocks = [block for block in harness.store if view in (None, block.namespace)]
        listed = harness.administer(ListEntries(limit=1000), salt=salt, admin=admin)
        assert isinstance(listed, EntryList)
        stats = stats_of(harness, salt, admin=admin)
        assert stats.unique_bytes == sum(block.size_bytes for block in blocks)
        assert stats.entries == len(listed.entries)
        assert stats.logical_bytes == sum(entry.size_bytes for entry in listed.entries)
        chains = (chain(entry.block) for entry in harness.entries.of(view))
        assert stats.logical_bytes == sum(block.size_bytes for each in chains for block in each)
        assert stats.by_tier == {"ram": len(listed.entries)}


def test_a_page_has_the_requested_length_and_the_position_of_the_next() -> None:
    harness = harness_with(tokens=16, entries=10)
    keys, before = list[str](), None
    for size in (4, 4, 2):
        page = harness.administer(ListEntries(limit=4, before=before))
        assert isinstance(page, EntryList)
        assert len(page.entries) == size
        keys += [entry.cache_key for entry in page.entries]
        before = page.next
    assert before is None
    assert keys == [entry.key for entry in harness.entries.of(None)][::-1]


def test_long_admin_work_yields_between_pieces() -> None:
    """So a new turn waits for one piece only."""
    harness = harness_with(tokens=16, entries=600)

    def pieces(op: AdminOp) -> int:
        request = AdminRequest(id=1, salt=b"", op=op)
        replies: list[AdminResult] = []
        count = sum(1 for _ in harness.runtime.admin.answer(request, None, replies.append))
        assert len(replies) == 1
        return count

    assert pieces(ListEntries(limit=600)) >= 600
    assert pieces(GetStats()) >= 600 // PIECE_ENTRIES
    for entry in harness.entries.of(None)[:300]:
        entry.ttl_s = 0.0
        harness.entries.touch(entry)
    assert sum(1 for _ in harness.runtime.upkeep()) >= 300
    assert pieces(RemoveOld(seconds=1e9)) >= 300 // PIECE_ENTRIES
    assert pieces(RemoveOld(seconds=-1)) >= 300
    assert not harness.entries.of(None)


# -- previews --

ASKED = [{"role": "user", "content": "What is the moon made of?"}]


def held(talks: Conversations) -> None:
    talks.answer(talks.begin(ASKED, salt=b"one"), "Of cheese.")


def previews(talks: Conversations, **asking: Any) -> list[str]:
    listed = talks.administer(ListEntries(), **asking)
    assert isinstance(listed, EntryList)
    shown = [talks.administer(ShowEntry(entry.cache_key), **asking) for entry in listed.entries]
    assert [each.preview for each in shown if isinstance(each, EntryInfo)] == [
        entry.preview for entry in listed.entries
    ]
    return [entry.preview for entry in listed.entries]


def test_a_preview_shows_the_first_words_of_the_last_message() -> None:
    talks = Conversations(CHATML)
    held(talks)
    assert previews(talks, salt=b"one") == ["What is the moon made of?"]
    assert previews(talks, salt=b"one", admin=True) == ["What is the moon made of?"]


def test_an_admin_gets_no_previews_of_other_tenants() -> None:
    talks = Conversations(CHATML)
    held(talks)
    assert previews(talks, salt=b"two") == []
    assert previews(talks, salt=b"two", admin=True) == [""]


def test_previews_survive_a_restart(tmp_path: Path) -> None:
    talks = Conversations(CHATML, folder=tmp_path)
    held(talks)
    talks.close()
    again = Conversations(CHATML, folder=tmp_path)
    assert previews(again, salt=b"one") == ["What is the moon made of?"]
    again.close()
