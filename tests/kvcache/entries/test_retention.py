"""Counts of entries are right after any change, and no turn looks at all entries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.kvcache.block import PrefixHandle
from rekindle.kvcache.entries.entries import Draft, Entries, Entry
from rekindle.kvcache.entries.retention import EntryLimits, Expiries, PinnedBlocks
from rekindle.kvcache.store import Store
from rekindle.kvcache.tiers.ram import RamTier
from rekindle.runtime.reuse.sessions import FINGERPRINT_SESSION, FingerprintSessions, Pins
from rekindle.tokens import Tokens
from tests.support.clock import FakeClock

A, B = b"a" * 32, b"b" * 32
FEW, MANY = 30, 3000


class Shelf:
    """Entries of two tenants, of which every third has a name, a lifetime or a pin."""

    def __init__(self, count: int = 0, limit_bytes: int = 1 << 30) -> None:
        self.clock = FakeClock()
        self.store = Store(block_tokens=8, tiers=[RamTier(1 << 40)])
        self.entries = Entries(self.store, self.clock, None, EntryLimits(limit_bytes, 100, 50))
        self.pins = Pins(self.entries, self.store)
        kinds: list[dict[str, Any]] = [{}, {"ttl_s": 1000.0, "keyed": True}, {"pinned": True}]
        for number in range(count):
            self.remember(number, A if number % 2 else B, **kinds[number % 3])

    def remember(self, number: int, tenant: bytes = A, **fields: Any) -> Entry:
        entry = self.entries.remember(conversation(number, tenant, **fields))
        assert entry is not None
        return entry


def conversation(number: int, tenant: bytes, **fields: Any) -> Draft:
    tokens = Tokens.of([number, *range(1_000_000, 1_000_019)])
    return Draft(namespace=tenant, tokens=tokens, text=b"%08d" % number, **fields)


@contextmanager
def touching(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[int]]:
    """Collects the entries of which anything is read."""
    touched: set[int] = set()

    def read(entry: Entry, name: str) -> Any:
        touched.add(id(entry))
        return object.__getattribute__(entry, name)

    with monkeypatch.context() as patched:
        patched.setattr(Entry, "__getattribute__", read, raising=False)
        yield touched


def finish_a_turn(shelf: Shelf) -> None:
    """At the budget's limit, so that another entry has to give way."""
    shelf.entries.budget.limit_bytes = shelf.entries.retention.used_bytes
    before = len(shelf.entries)
    shelf.remember(10_000_000, A)
    assert len(shelf.entries) == before


def expire_one(shelf: Shelf) -> None:
    """The others were used since they were made, and have been looked at once."""
    shelf.remember(10_000_000, ttl_s=10.0)
    shelf.clock.pass_by(11)
    assert shelf.entries.collect()[0] == 1


def check_a_pin(shelf: Shelf) -> None:
    shelf.pins.check(PrefixHandle(A, Tokens.of([5, 6, 7])), 4096)


def check_a_temporary_pin(shelf: Shelf) -> None:
    assert shelf.pins.can_pin_temporarily(PrefixHandle(A, Tokens.of([5, 6, 7])), 4096)


def begin_a_session(shelf: Shelf) -> None:
    sessions = FingerprintSessions(shelf.entries, lambda _line: None)
    assert sessions._new_session(A) == "auto_session_0"


def pin_and_unpin(shelf: Shelf) -> None:
    entry = shelf.remember(10_000_000)
    shelf.entries.pin(entry)
    shelf.entries.unpin(entry)
    shelf.entries.store(entry, b"document")


@pytest.mark.parametrize(
    "act",
    [
        finish_a_turn,
        expire_one,
        check_a_pin,
        check_a_temporary_pin,
        begin_a_session,
        pin_and_unpin,
    ],
)
def test_no_work_on_the_engines_thread_looks_at_all_entries(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[Shelf], None]
) -> None:
    counts = []
    for count in (FEW, MANY):
        shelf = Shelf(count)
        with touching(monkeypatch) as touched:
            act(shelf)
        counts.append(len(touched))
    assert counts[0] == counts[1] <= 3


def test_sessions_continue_after_the_highest_number_that_was_given() -> None:
    shelf = Shelf(6)
    for number, session in enumerate(("auto_session_4", "auto_session_17", "auto_session_x")):
        shelf.remember(number, names=((FINGERPRINT_SESSION, session),))
    shelf.remember(9, B, names=((FINGERPRINT_SESSION, "auto_session_99"),))
    sessions = FingerprintSessions(shelf.entries, lambda _line: None)
    assert [sessions._new_session(A) for _ in range(2)] == ["auto_session_18", "auto_session_19"]


def test_the_largest_tenant_gives_way_first_with_its_unnamed_entries() -> None:
    shelf = Shelf()
    shelf.remember(0, B)
    named = shelf.remember(1, A, names=(("session_id", "s"),))
    for number in (2, 3):
        shelf.remember(number, A)
    gone: list[Entry] = []

    def forget(entry: Entry) -> None:
        gone.append(entry)
        shelf.entries.forget(entry)

    shelf.entries.budget.limit_bytes = shelf.entries.retention.used_bytes // 2
    shelf.entries.budget.enforce(forget)
    assert [entry.text for entry in gone] == [b"00000002", b"00000003"]
    shelf.entries.budget.limit_bytes = 0
    shelf.entries.budget.enforce(forget)
    assert gone[2:] == [named, gone[3]]
    assert len(shelf.entries) == 0


def test_a_tenant_whose_entries_are_all_pinned_does_not_protect_others_from_the_limit() -> None:
    shelf = Shelf()
    for number in range(3):
        shelf.entries.pin(shelf.remember(number, A))
    limit_bytes = shelf.entries.budget.limit_bytes = shelf.entries.retention.used_bytes
    assert shelf.entries.remember(Draft(namespace=B, tokens=Tokens.of([1]))) is None
    assert shelf.entries.retention.used_bytes <= limit_bytes
    assert [entry.tenant for entry in shelf.entries.of(None)] == [A] * 3


def test_times_of_deleted_entries_do_not_add_up() -> None:
    expiries = Expiries()
    for number in range(10_000):
        expiries.schedule(str(number), 1e6 + number)
        expiries.drop(str(number - 10))
    assert len(expiries) == 10
    assert len(expiries._heap) < 200


def test_an_entry_is_due_at_the_earliest_of_its_times() -> None:
    expiries = Expiries()
    expiries.schedule("a", 10.0)
    expiries.schedule("a", 20.0)  # it was used, and is looked at too early
    expiries.schedule("b", 15.0)
    expiries.schedule("b", 5.0)  # its lifetime was shortened
    assert [expiries.pop_due(12.0) for _ in range(3)] == ["b", "a", None]
    assert expiries.pop_due(100.0) is None


numbers = st.integers(0, 5)
actions = st.lists(
    st.tuples(
        st.sampled_from(["remember", "name", "pin", "unpin", "store", "touch", "remove", "wait"]),
        numbers,
        st.sampled_from([A, B]),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(actions)
def test_counts_equal_those_of_all_entries(steps: list[tuple[str, int, bytes]]) -> None:
    shelf = Shelf(limit_bytes=60_000)
    for action, number, tenant in steps:
        act(shelf, action, number, tenant)
        assert_counts(shelf)
    shelf.entries.budget.limit_bytes = 0
    for entry in shelf.entries.of(None):
        shelf.entries.remove(entry)
    assert_counts(shelf)
    assert not shelf.entries.retention.expiries
    assert not shelf.entries.retention._counted


def act(shelf: Shelf, action: str, number: int, tenant: bytes) -> None:
    entries, known = shelf.entries, shelf.entries.of(tenant)
    match action:
        case "remember":
            pin_s = 10.0 if number % 2 else None
            entries.remember(conversation(number, tenant, pin_s=pin_s, ttl_s=20.0))
        case "name":
            names = (("session_id", str(number % 2)),)
            entries.remember(conversation(number, tenant, names=names))
        case "wait":
            shelf.clock.pass_by(number)
            entries.collect()
        case _ if known:
            entry = known[number % len(known)]
            if action == "store":
                entries.store(entry, bytes(number * 3000))
            else:
                getattr(entries, action)(entry)


def assert_counts(shelf: Shelf) -> None:
    retention, everything = shelf.entries.retention, shelf.entries.index.of(None)
    pinned = [entry for entry in everything if entry.pinned]
    assert retention.used_bytes == sum(entry.cost_bytes for entry in everything)
    held, held_pinned = Counter[bytes](), Counter[bytes | None]()
    for entry in everything:
        held[entry.tenant] += entry.cost_bytes
    for entry in pinned:
        held_pinned.update({entry.tenant: entry.cost_bytes, None: entry.cost_bytes})
    assert retention.held_bytes == held
    assert retention.pinned_bytes == held_pinned
    tiers = shelf.store.tiers
    again = PinnedBlocks(tiers, 8, EntryLimits(0, 100, 50))
    for entry in pinned:
        again.add(entry.tenant, entry.namespace, entry.tokens)
    assert retention.pinned_blocks._blocks == again._blocks
    for view in (A, B, None):
        assert retention.pinned_blocks.held_bytes(tiers[0], view) == again.held_bytes(
            tiers[0], view
        )
    victim = retention.next_victim()
    unpinned = [entry for entry in everything if not entry.pinned]
    assert (victim is None) == (not unpinned)
    if victim is not None:
        assert held[victim.tenant] == max(held[entry.tenant] for entry in unpinned)
        own = [entry for entry in unpinned if entry.tenant == victim.tenant]
        assert victim.is_free or not any(entry.is_free for entry in own)
