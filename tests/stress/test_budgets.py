"""Budgets are hard limits, and one tenant's flood cannot take another tenant's share."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.protocol.admin import DocumentStored, StoreDocument
from rekindle.protocol.requests import Names, Prepare
from rekindle.runtime.storage.storage import MIN_ENTRIES_DISK_BYTES, MIN_QUEUE_BYTES
from tests.stress.storage_harness import StorageHarness, load
from tests.support.fake import FakeEngine
from tests.support.rounds import rounds

MB = 1 << 20
PROMPTS = rounds(2_000, 10_000)
LOOK_EVERY = 500
DISK_BYTES = 6 * MB
RAM_BYTES = MIN_QUEUE_BYTES + MB
ENTRIES_BYTES = MIN_ENTRIES_DISK_BYTES  # the default share of such a small disk would be less
ALICE, BOB = b"alice", b"bob"
PROMISED = list(range(300, 341))
CONVERSATION = list(range(400, 431))
SECTOR_BYTES = 512  # unit of st_blocks on every file system


def used_bytes(folder: Path) -> int:
    """The disk space that the folder really uses."""
    return sum(path.lstat().st_blocks for path in folder.rglob("*")) * SECTOR_BYTES


@pytest.mark.long
def test_a_flood_of_prompts_stays_within_its_tenants_share(tmp_path: Path) -> None:
    """One tenant sends thousands of different prompts.

    Another tenant still finds its pinned prompt and its conversation, also after a restart.
    """
    order = load(tmp_path, disk_cache=DISK_BYTES, ram_cache=RAM_BYTES)
    harness = StorageHarness(FakeEngine(), order)
    harness.ask(PROMISED, salt=ALICE, prepare=Prepare(pinned=True, ttl_s=None), max_tokens=0)
    harness.ask(CONVERSATION, salt=ALICE, names=Names(session_id="usual"))
    for number in range(PROMPTS):
        flood = [*divmod(number, 900), *range(100, 108)]
        names = Names(session_id=str(number), return_cache_key=True) if number % 2 else None
        harness.ask(flood, salt=BOB, max_tokens=1, names=names)
        if number % LOOK_EVERY == LOOK_EVERY - 1:
            harness.flush()
            assert harness.used_bytes_hold()
            assert harness.entries.retention.used_bytes <= ENTRIES_BYTES
            assert used_bytes(tmp_path) <= DISK_BYTES
    # State leaves with its entry, or is evicted before.
    assert len(harness.entries.of(harness.namespace(BOB))) < PROMPTS // 2
    assert harness.store.evictions(harness.namespace(ALICE)) == 0
    finds_her_own(harness)
    harness.close()
    assert used_bytes(tmp_path) <= DISK_BYTES
    again = StorageHarness(FakeEngine(), order)
    finds_her_own(again)
    again.close()


def finds_her_own(harness: StorageHarness) -> None:
    assert harness.entries.by_name(harness.namespace(ALICE), ("session_id", "usual")) is not None
    [pinned] = (entry for entry in harness.entries.of(harness.namespace(ALICE)) if entry.pinned)
    assert len(pinned.tokens) == len(PROMISED)
    assert harness.ask([*PROMISED, 7], salt=ALICE).reused == len(PROMISED)
    assert harness.ask([*CONVERSATION, 7], salt=ALICE).reused == len(CONVERSATION)


def test_many_tenants_get_equal_shares(tmp_path: Path) -> None:
    """The largest tenant is evicted first, so a small tenant keeps its state."""
    harness = StorageHarness(FakeEngine(), load(tmp_path, disk_cache=2 * MB, ram_cache=RAM_BYTES))
    small = [b"small %d" % number for number in range(4)]
    for salt in small:
        harness.ask(CONVERSATION, salt=salt)
    for number in range(300):
        harness.ask([number, *range(100, 124)], salt=BOB, max_tokens=1)
    harness.flush()
    assert harness.store.evictions(harness.namespace(BOB)) > 100
    for salt in small:
        assert harness.ask([*CONVERSATION, 7], salt=salt).reused == len(CONVERSATION)
    assert harness.used_bytes_hold()
    harness.close()


def test_a_reduced_budget_applies_from_the_start(tmp_path: Path) -> None:
    harness = StorageHarness(FakeEngine(), load(tmp_path, disk_cache=8 * MB))
    harness.entries.budget.limit_bytes = 8 * MB  # the state of this engine is smaller than entries
    for number in range(600):
        harness.ask([number, *range(100, 116)], max_tokens=1)
    harness.close()
    assert used_bytes(tmp_path) > 4 * MB
    again = StorageHarness(FakeEngine(), load(tmp_path, disk_cache=3 * MB))
    again.flush()
    assert again.used_bytes_hold()
    again.close()
    assert used_bytes(tmp_path) <= 3 * MB


@pytest.mark.parametrize("pin_s", [None, 1800.0])
def test_a_flood_of_documents_stays_within_all_budgets(tmp_path: Path, pin_s: float | None) -> None:
    """Documents share the memory and the disk with entries, pinned or not."""
    disk_bytes = 64 * MB
    harness = StorageHarness(
        FakeEngine(), load(tmp_path, disk_cache=disk_bytes, ram_cache=RAM_BYTES)
    )
    harness.ask(CONVERSATION, salt=ALICE, names=Names(session_id="usual"))
    limit_bytes = harness.entries.budget.limit_bytes
    for number in range(24):
        names = Names(entry_key=f"resp_{number}", pin_s=pin_s, ttl_s=3600.0)
        harness.ask([number, *PROMISED], salt=BOB, names=names)
        content = bytes([number]) * (limit_bytes * 9 // 10)
        op = StoreDocument(key=f"resp_{number}", content=content)
        assert harness.administer(op, salt=BOB) == DocumentStored(kept=True, durable=True)
        assert harness.entries.retention.used_bytes <= limit_bytes
    assert harness.entries.by_name(harness.namespace(ALICE), ("session_id", "usual")) is not None
    assert harness.disk is not None
    state_bytes = harness.disk.budget.used_bytes
    room_bytes = disk_bytes - harness.disk.budget.limit_bytes  # what is not for state
    harness.close()
    assert used_bytes(tmp_path) - state_bytes <= room_bytes
