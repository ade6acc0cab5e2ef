"""Documents that clients store have the lifetime of entries, with or without KV state."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from rekindle.errors import CacheKeyNotFound, NoRoomForPins
from rekindle.kvcache.tiers.disk import MIN_INDEX_BYTES
from rekindle.protocol.admin import (
    CollectExpired,
    DeleteEntry,
    Document,
    DocumentKeys,
    DocumentStored,
    EntryInfo,
    GetDocument,
    ListDocuments,
    PinEntry,
    Removed,
    ShowEntry,
    StoreDocument,
)
from rekindle.protocol.requests import Names
from tests.support.clock import FakeClock
from tests.support.fake import FakeEngine
from tests.support.harness import RuntimeHarness

PROMPT = list(range(100, 140))
KEY = "resp_1"
MIB = 1 << 20


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def harness(clock: FakeClock) -> RuntimeHarness:
    return RuntimeHarness(FakeEngine(), clock=clock)


def store(harness: RuntimeHarness, content: bytes, key: str = KEY, salt: bytes = b"") -> bool:
    op = StoreDocument(key=key, content=content, ttl_s=1000.0)
    stored = harness.administer(op, salt=salt)
    assert isinstance(stored, DocumentStored)
    return stored.kept


def content_of(harness: RuntimeHarness, key: str = KEY, salt: bytes = b"") -> bytes:
    document = harness.administer(GetDocument(key), salt=salt)
    assert isinstance(document, Document)
    return document.content


def shown(harness: RuntimeHarness, key: str = KEY) -> EntryInfo:
    info = harness.administer(ShowEntry(key))
    assert isinstance(info, EntryInfo)
    return info


def test_a_turn_can_choose_its_key_and_store_a_document_under_it(harness: RuntimeHarness) -> None:
    first = harness.ask(PROMPT, names=Names(entry_key=KEY))
    assert store(harness, b"one")
    assert content_of(harness) == b"one"
    assert shown(harness).token_count == len(first.turn.tokens)
    going_on = [*first.turn.tokens, 7, 8]
    report = harness.ask(going_on, names=Names(cache_key=KEY)).finished.cache
    assert (report.status, report.cache_key) == ("hit", KEY)


def test_two_equal_turns_have_separate_documents(harness: RuntimeHarness) -> None:
    for key in ("resp_1", "resp_2"):
        harness.ask(PROMPT, names=Names(entry_key=key))
        assert store(harness, key.encode(), key)
    harness.ask(PROMPT, names=Names(session_id="s"))
    assert [content_of(harness, key) for key in ("resp_1", "resp_2")] == [b"resp_1", b"resp_2"]
    harness.administer(DeleteEntry("resp_2"))
    assert content_of(harness, "resp_1") == b"resp_1"
    with pytest.raises(CacheKeyNotFound):
        content_of(harness, "resp_2")


def test_a_document_can_be_stored_without_state(harness: RuntimeHarness) -> None:
    assert store(harness, b"one")
    assert store(harness, b"two")
    assert store(harness, b"three", key="conv_2")
    assert content_of(harness) == b"two"
    info = shown(harness)
    assert (info.token_count, info.tier, info.size_bytes) == (0, None, 0)
    removed = harness.administer(DeleteEntry(KEY))
    assert isinstance(removed, Removed)
    assert removed.entries == 1
    assert content_of(harness, "conv_2") == b"three"


def test_reading_an_entry_without_a_document_is_not_found(harness: RuntimeHarness) -> None:
    harness.ask(PROMPT, names=Names(entry_key=KEY))
    with pytest.raises(CacheKeyNotFound):
        content_of(harness)


def test_only_its_own_tenant_can_read_a_document(harness: RuntimeHarness) -> None:
    assert store(harness, b"mine", salt=b"a")
    for options in ({"salt": b"b"}, {"admin": True}):
        with pytest.raises(CacheKeyNotFound):
            harness.administer(GetDocument(KEY), **options)
    assert content_of(harness, salt=b"a") == b"mine"


def test_a_document_expires_unless_it_is_pinned(harness: RuntimeHarness, clock: FakeClock) -> None:
    assert store(harness, b"pinned", key="conv_p")
    assert store(harness, b"not")
    harness.administer(PinEntry("conv_p", pinned=True))
    clock.pass_by(1001)
    harness.administer(CollectExpired())
    with pytest.raises(CacheKeyNotFound):
        content_of(harness)
    assert content_of(harness, "conv_p") == b"pinned"


def test_documents_count_towards_the_budget_of_entries(harness: RuntimeHarness) -> None:
    entries = harness.storage.entries
    entries.budget.limit_bytes = 4 * MIB
    assert not store(harness, bytes(5 * MIB), key="huge")
    for number in range(10):
        assert store(harness, bytes([number]) * MIB, key=f"resp_{number}")
        assert entries.retention.used_bytes <= entries.budget.limit_bytes
    assert content_of(harness, "resp_9") == bytes([9]) * MIB
    with pytest.raises(CacheKeyNotFound):
        content_of(harness, "resp_0")
    for entry in entries.of(None):
        entries.remove(entry)
    assert entries.retention.used_bytes == 0


def test_a_document_for_which_there_is_no_room_leaves_no_entry(harness: RuntimeHarness) -> None:
    harness.entries.budget.limit_bytes = MIB
    assert not store(harness, bytes(2 * MIB))
    assert len(harness.entries) == 0


def test_a_document_is_durable_when_the_disk_has_it(
    tmp_path: Path, harness: RuntimeHarness
) -> None:
    def stored() -> DocumentStored:
        found = harness.administer(StoreDocument(key=KEY, content=b"one"))
        assert isinstance(found, DocumentStored)
        return found

    assert stored() == DocumentStored(kept=True, durable=True)  # the operator wants no disk
    harness.storage.no_disk_reason = "failing"
    assert stored() == DocumentStored(kept=True, durable=False)
    harness = RuntimeHarness(FakeEngine(), folder=tmp_path)
    assert stored() == DocumentStored(kept=True, durable=True)
    assert harness.disk is not None
    harness.disk.folder.index_db.close()  # commits fail from now on
    assert stored() == DocumentStored(kept=True, durable=False)


def test_documents_survive_a_restart(tmp_path: Path, clock: FakeClock) -> None:
    harness = RuntimeHarness(FakeEngine(), clock=clock, folder=tmp_path)
    harness.ask(PROMPT, names=Names(entry_key=KEY, in_memory=True))
    assert store(harness, b"response " * 1000)
    assert store(harness, b"conversation", key="conv_1")
    tokens = shown(harness).token_count
    harness.close()
    again = RuntimeHarness(FakeEngine(), clock=clock, folder=tmp_path)
    assert content_of(again) == b"response " * 1000
    assert content_of(again, "conv_1") == b"conversation"
    assert shown(again).token_count == tokens
    again.administer(DeleteEntry("conv_1"))
    again.close()
    last = RuntimeHarness(FakeEngine(), clock=clock, folder=tmp_path)
    assert content_of(last)
    with pytest.raises(CacheKeyNotFound):
        content_of(last, "conv_1")
    last.close()


def test_documents_of_pinned_entries_stay_within_the_budget(
    tmp_path: Path, clock: FakeClock
) -> None:
    """24 pinned responses of 12 MiB took 270 MB of RAM and 317 MB of disk of a budget of 31 MB."""
    harness = RuntimeHarness(FakeEngine(), clock=clock, folder=tmp_path)
    harness.entries.budget.limit_bytes = 3 * MIB
    assert store(harness, b"of another tenant", key="conv_b", salt=b"b")
    for number in range(24):
        key = f"resp_{number}"
        harness.ask([number, *PROMPT], names=Names(entry_key=key, pin_s=1800.0, ttl_s=3600.0))
        assert store(harness, bytes([number]) * (5 * MIB // 4), key=key)
        assert harness.entries.retention.used_bytes <= 3 * MIB
        assert content_of(harness, key) == bytes([number]) * (5 * MIB // 4)
    assert content_of(harness, "conv_b", b"b") == b"of another tenant"
    harness.close()
    [index] = tmp_path.rglob("index.db")
    replaced_bytes = 5 * MIB // 4  # a document is written before the one that gives way is removed
    assert index.stat().st_size <= MIN_INDEX_BYTES + 3 * MIB + replaced_bytes


def test_a_document_that_gave_way_leaves_the_memory(harness: RuntimeHarness) -> None:
    harness.entries.budget.limit_bytes = 3 * MIB
    assert store(harness, b"warms up", key="conv_1")
    tracemalloc.start()
    try:
        for number in range(20):
            assert store(harness, bytes([number]) * (2 * MIB), key=f"resp_{number}")
        assert tracemalloc.get_traced_memory()[0] < 4 * MIB
    finally:
        tracemalloc.stop()


def test_small_documents_of_pinned_entries_keep_their_pins(harness: RuntimeHarness) -> None:
    harness.ask(PROMPT, names=Names(entry_key=KEY, pin_s=1800.0))
    assert store(harness, bytes(MIB))
    assert shown(harness).pinned


def test_a_document_that_does_not_fit_under_a_permanent_pin_is_refused(
    harness: RuntimeHarness,
) -> None:
    harness.entries.budget.limit_bytes = 4 * MIB
    assert store(harness, b"small")
    harness.administer(PinEntry(KEY, pinned=True))
    assert not store(harness, bytes(3 * MIB))
    assert (content_of(harness), shown(harness).pinned) == (b"small", True)
    assert store(harness, bytes(MIB))
    for number in range(8):
        assert store(harness, bytes(MIB), key=f"resp_{number}")
        assert harness.entries.retention.used_bytes <= 4 * MIB
    assert content_of(harness) == bytes(MIB)


def test_pins_of_documents_leave_room_for_other_tenants(harness: RuntimeHarness) -> None:
    harness.entries.budget.limit_bytes = 4 * MIB
    assert store(harness, b"x", key="conv_b", salt=b"b")
    assert store(harness, bytes(3 * MIB // 2))
    with pytest.raises(NoRoomForPins, match="memory for tokens, text and documents"):
        harness.administer(PinEntry(KEY, pinned=True))
    assert store(harness, bytes(MIB // 2))
    harness.administer(PinEntry(KEY, pinned=True))
    assert shown(harness).pinned


def test_a_temporary_pin_can_be_made_permanent(harness: RuntimeHarness, clock: FakeClock) -> None:
    harness.ask(PROMPT, names=Names(entry_key=KEY, pin_s=10.0))
    harness.administer(PinEntry(KEY, pinned=True))
    clock.pass_by(11)
    harness.administer(CollectExpired())
    assert shown(harness).pinned


def test_the_documents_of_a_tenant_are_listed_by_their_prefix_oldest_first(
    harness: RuntimeHarness, clock: FakeClock
) -> None:
    for key in ("chat_2", "resp_1", "chat_1"):
        store(harness, b"{}", key)
        clock.pass_by(1.0)
    store(harness, b"{}", "chat_3", salt=b"another")
    listed = harness.administer(ListDocuments("chat_"))
    assert isinstance(listed, DocumentKeys)
    assert listed.keys == ["chat_2", "chat_1"]
    assert listed.created_at == sorted(listed.created_at)
    clock.pass_by(2000.0)
    assert harness.administer(ListDocuments("chat_")) == DocumentKeys([], [])
