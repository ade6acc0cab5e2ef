"""A tenant that stores and pins without end fills its own share, and no other tenant's.

The entries' budget is a hard limit for documents too, pinned or not. Another tenant keeps what it
stored, and it can still store and pin.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rekindle.errors import CacheKeyNotFound, NoRoomForPins
from rekindle.protocol.admin import (
    Document,
    DocumentStored,
    EntryInfo,
    GetDocument,
    PinEntry,
    StoreDocument,
)
from rekindle.protocol.requests import Names
from rekindle.runtime.storage.storage import MIN_ENTRIES_DISK_BYTES, MIN_QUEUE_BYTES
from tests.stress.storage_harness import StorageHarness, load
from tests.stress.test_budgets import used_bytes
from tests.support.fake import FakeEngine
from tests.support.rounds import rounds

MB = 1 << 20
DOCUMENTS = rounds(200, 600)
LOOK_EVERY = 50
DISK_BYTES = 6 * MB
ENTRIES_BYTES = MIN_ENTRIES_DISK_BYTES  # the default share of such a small disk would be less
ALICE, BOB = b"alice", b"bob"
SMALL, LARGE = b"a" * 2_000, 20_000
MONTH_S = 30 * 24 * 3600.0

Flood = Callable[["Tenant", int], None]


def entries_bytes(harness: StorageHarness, namespace: bytes | None = None) -> int:
    """The memory of a tenant's entries, or of all. Counted here, not by the code under test."""
    return sum(entry.cost_bytes for entry in harness.entries.of(namespace))


class Tenant:
    """Stores documents as the front does for one key."""

    def __init__(self, harness: StorageHarness, salt: bytes) -> None:
        self.harness = harness
        self.salt = salt

    @property
    def namespace(self) -> bytes:
        return self.harness.namespace(self.salt)

    @property
    def held_bytes(self) -> int:
        return entries_bytes(self.harness, self.namespace)

    def respond(self, key: str, content: bytes) -> bool:
        """Store a response: a turn, and its document."""
        number = int.from_bytes(key.encode()[-4:], "big")
        prompt = [number >> 16, number & 0xFFFF, *range(100, 110)]
        self.harness.ask(prompt, salt=self.salt, max_tokens=1, names=Names(entry_key=key))
        return self.store(key, content, ttl_s=MONTH_S)

    def store(self, key: str, content: bytes, ttl_s: float | None = None) -> bool:
        stored = self.harness.administer(
            StoreDocument(key=key, content=content, ttl_s=ttl_s), salt=self.salt
        )
        assert isinstance(stored, DocumentStored)
        return stored.kept

    def pin(self, key: str) -> bool:
        """Whether there was room for the pin."""
        try:
            answer = self.harness.administer(PinEntry(key, pinned=True), salt=self.salt)
        except (NoRoomForPins, CacheKeyNotFound):
            return False
        assert isinstance(answer, EntryInfo)
        return answer.pinned

    def read(self, key: str) -> bytes:
        document = self.harness.administer(GetDocument(key), salt=self.salt)
        assert isinstance(document, Document)
        return document.content


def content_of(number: int, size: int = LARGE) -> bytes:
    return b"%d:" % number + bytes([number % 251]) * size


def flood_with_responses(bob: Tenant, number: int) -> None:
    bob.respond(f"resp_{number:04}", content_of(number))


def flood_with_conversations(bob: Tenant, number: int) -> None:
    """New conversations, and four that grow."""
    bob.store(f"conv_{number:04}", content_of(number))
    bob.store(f"conv_grows_{number % 4}", content_of(number, 600 * number))


def flood_with_pinned_responses(bob: Tenant, number: int) -> None:
    key = f"resp_{number:04}"
    if bob.respond(key, content_of(number, 2_000)):
        bob.pin(key)


def flood_with_pins_that_grow(bob: Tenant, number: int) -> None:
    """Small documents are pinned first and replaced by large ones afterwards."""
    key = f"conv_{number % 16:04}"
    bob.store(key, content_of(number, 100))
    bob.pin(key)
    bob.store(key, content_of(number, LARGE))


FLOODS: list[Flood] = [
    flood_with_responses,
    flood_with_conversations,
    flood_with_pinned_responses,
    flood_with_pins_that_grow,
]


@pytest.mark.long
@pytest.mark.parametrize("flood", FLOODS, ids=lambda flood: flood.__name__)
def test_a_flood_of_documents_stays_within_its_tenants_share(tmp_path: Path, flood: Flood) -> None:
    order = load(tmp_path, disk_cache=DISK_BYTES, ram_cache=MIN_QUEUE_BYTES + MB)
    harness = StorageHarness(FakeEngine(), order)
    alice, bob = Tenant(harness, ALICE), Tenant(harness, BOB)
    assert alice.respond("resp_alice", SMALL)
    assert alice.store("conv_alice", SMALL)
    assert alice.respond("resp_promised", SMALL)
    assert alice.pin("resp_promised")
    for number in range(DOCUMENTS):
        flood(bob, number)
        assert entries_bytes(harness) <= ENTRIES_BYTES
        if number % LOOK_EVERY == LOOK_EVERY - 1:
            harness.flush()
            assert harness.used_bytes_hold()
            assert used_bytes(tmp_path) <= DISK_BYTES
    assert bob.held_bytes <= ENTRIES_BYTES - alice.held_bytes
    finds_her_own(alice)
    stores_more(alice)
    harness.close()
    again = StorageHarness(FakeEngine(), order)
    assert entries_bytes(again) <= ENTRIES_BYTES
    finds_her_own(Tenant(again, ALICE))
    again.close()


def finds_her_own(alice: Tenant) -> None:
    for key in ("resp_alice", "conv_alice", "resp_promised"):
        assert alice.read(key) == SMALL
    [pinned] = (entry for entry in alice.harness.entries.of(alice.namespace) if entry.pinned)
    assert pinned.key == "resp_promised"


def stores_more(alice: Tenant) -> None:
    """Up to her half of the budget, whatever the other tenant has pinned."""
    number = 0
    while alice.held_bytes + LARGE < ENTRIES_BYTES // 2:
        key = f"conv_more_{number}"
        assert alice.store(key, content_of(number, LARGE // 2))
        assert alice.read(key) == content_of(number, LARGE // 2)
        number += 1
    assert number > 4
    assert entries_bytes(alice.harness) <= ENTRIES_BYTES
