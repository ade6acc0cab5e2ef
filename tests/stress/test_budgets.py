"""Budgets are hard, and one tenant's flood takes nothing from another's share."""

from __future__ import annotations

from pathlib import Path

from rekindle.protocol.requests import Prepare
from rekindle.runtime.storage import LEAST_QUEUE_BYTES
from tests.stress.office import StorageHarness, load
from tests.support.fake import FakeEngine

MB = 1 << 20
PROMPTS = 10_000
LOOK_EVERY = 500
DISK_BYTES = 6 * MB
RAM_BYTES = LEAST_QUEUE_BYTES + MB
ALICE, BOB = b"alice", b"bob"
PROMISED = list(range(300, 341))
USUAL = list(range(400, 431))
SECTOR_BYTES = 512  # what st_blocks counts in, whatever the file system


def used_bytes(folder: Path) -> int:
    """What the folder really takes of the disk, everything counted."""
    return sum(path.lstat().st_blocks for path in folder.rglob("*")) * SECTOR_BYTES


def test_a_flood_of_prompts_stays_in_its_share(tmp_path: Path) -> None:
    """Ten thousand prompts that nobody asks twice, of one tenant; another has a pinned prompt and
    a conversation, and finds both afterwards, from the disk too."""
    order = load(tmp_path, disk_cache=DISK_BYTES, ram_cache=RAM_BYTES)
    office = StorageHarness(FakeEngine(), order)
    office.ask(PROMISED, salt=ALICE, prepare=Prepare(pinned=True, ttl_s=None), max_tokens=0)
    office.ask(USUAL, salt=ALICE)
    for number in range(PROMPTS):
        flood = [*divmod(number, 900), *range(100, 108)]
        office.ask(flood, salt=BOB, max_tokens=1)
        if number % LOOK_EVERY == LOOK_EVERY - 1:
            office.flush()
            assert office.used_bytes_hold()
            assert used_bytes(tmp_path) <= DISK_BYTES
    assert office.store.evictions(office.namespace(BOB)) > PROMPTS // 2
    assert office.store.evictions(office.namespace(ALICE)) == 0
    finds_her_own(office)
    office.close()
    assert used_bytes(tmp_path) <= DISK_BYTES
    again = StorageHarness(FakeEngine(), order)
    finds_her_own(again)
    again.close()


def finds_her_own(office: StorageHarness) -> None:
    [pinned] = (entry for entry in office.entries.of(office.namespace(ALICE)) if entry.pinned)
    assert len(pinned.tokens) == len(PROMISED)
    assert office.ask([*PROMISED, 7], salt=ALICE).reused == len(PROMISED)
    assert office.ask([*USUAL, 7], salt=ALICE).reused == len(USUAL)


def test_many_tenants_share_evenly(tmp_path: Path) -> None:
    """Whoever holds most makes room, so a small tenant keeps what it has."""
    office = StorageHarness(FakeEngine(), load(tmp_path, disk_cache=2 * MB, ram_cache=RAM_BYTES))
    small = [b"small %d" % number for number in range(4)]
    for salt in small:
        office.ask(USUAL, salt=salt)
    for number in range(300):
        office.ask([number, *range(100, 124)], salt=BOB, max_tokens=1)
    office.flush()
    assert office.store.evictions(office.namespace(BOB)) > 100
    for salt in small:
        assert office.ask([*USUAL, 7], salt=salt).reused == len(USUAL)
    assert office.used_bytes_hold()
    office.close()


def test_a_budget_that_became_smaller_is_kept_from_the_start(tmp_path: Path) -> None:
    office = StorageHarness(FakeEngine(), load(tmp_path, disk_cache=8 * MB))
    for number in range(600):
        office.ask([number, *range(100, 116)], max_tokens=1)
    office.close()
    assert used_bytes(tmp_path) > 4 * MB
    again = StorageHarness(FakeEngine(), load(tmp_path, disk_cache=3 * MB))
    again.flush()
    assert again.used_bytes_hold()
    again.close()
    assert used_bytes(tmp_path) <= 3 * MB
