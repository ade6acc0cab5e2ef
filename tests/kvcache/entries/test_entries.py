"""Tests of remembering entries: expiry, loading after a restart, and several KV types."""

from __future__ import annotations

from rekindle.kvcache.block import chain_key
from rekindle.kvcache.disk.entry_table import EntryRow
from rekindle.kvcache.entries.entries import Draft, Entries, _to_row
from rekindle.kvcache.store import Store
from rekindle.kvcache.tiers.ram import RamTier
from rekindle.tokens import Tokens
from tests.support.clock import FakeClock

TENANT, OTHER_TYPE = b"a" * 32, b"b" * 32
BLOCK_TOKENS = 8
PROMPT = Tokens.of(range(24))


class Kept:
    """Entries and the store that holds their state."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.store = Store(block_tokens=BLOCK_TOKENS, tiers=[RamTier(1 << 30)])
        self.entries = Entries(self.store, self.clock)

    def put(self, tokens: Tokens, namespace: bytes = TENANT) -> None:
        """Store the state of these tokens."""
        parent = namespace
        for start in range(0, len(tokens), BLOCK_TOKENS):
            part = tokens[start : start + BLOCK_TOKENS]
            assert self.store.put(namespace, parent, part, b"state", exact=False, tenant=TENANT)
            parent = chain_key(parent, part)

    def held(self, tokens: Tokens, namespace: bytes = TENANT) -> int:
        return self.store.match(namespace, tokens).tokens


def stored_row(draft: Draft) -> EntryRow:
    """The row of an entry of an earlier process."""
    earlier = Kept()
    entry = earlier.entries.remember(draft)
    assert entry is not None
    return _to_row(entry, earlier.clock)


def test_a_conversation_that_has_expired_is_remembered_again() -> None:
    kept = Kept()
    draft = Draft(namespace=TENANT, tokens=PROMPT, text=b"text", ttl_s=10.0)
    first = kept.entries.remember(draft)
    kept.clock.pass_by(11)
    again = kept.entries.remember(draft)
    assert first is not None
    assert again is not None
    assert again.key != first.key
    assert kept.entries.of(TENANT) == [again]


def test_forgetting_an_entry_while_others_are_loaded_frees_nothing_of_theirs() -> None:
    kept = Kept()
    shared = list(range(BLOCK_TOKENS))
    loaded = Tokens.of([*shared, *range(100, 116)])
    own = Tokens.of([*shared, *range(300, 308)])
    mine = kept.entries.remember(Draft(namespace=TENANT, tokens=own, text=b"mine"))
    assert mine is not None
    kept.put(own)
    kept.entries.load([stored_row(Draft(namespace=TENANT, tokens=loaded, key="old", keyed=True))])
    kept.put(loaded)
    kept.entries.forget(mine)
    assert kept.held(loaded) == len(loaded)
    kept.entries.settle()
    assert kept.held(loaded) == len(loaded)
    assert kept.held(own) == len(shared), "the rest was freed when all was loaded"


def test_an_entry_with_a_known_key_is_not_loaded_again() -> None:
    kept = Kept()
    newer = kept.entries.remember(Draft(namespace=TENANT, key="resp_1", keyed=True))
    kept.entries.load([stored_row(Draft(namespace=TENANT, key="resp_1", keyed=True))])
    kept.entries.settle()
    assert newer is not None
    assert kept.entries.of(TENANT) == [newer]
    kept.entries.remove(newer)
    assert kept.entries.of(TENANT) == []
    assert kept.entries.retention.used_bytes == 0


def test_a_turn_that_ends_in_an_entry_that_is_being_loaded_keeps_its_state() -> None:
    kept = Kept()
    row = stored_row(Draft(namespace=TENANT, tokens=PROMPT, text=b"text", key="old", keyed=True))
    kept.entries.load([row])
    entry = kept.entries.remember(Draft(namespace=TENANT, tokens=PROMPT, text=b"text"))
    assert entry is not None
    assert entry.key == "old"
    assert kept.store.conversations.reach(TENANT, PROMPT[:BLOCK_TOKENS])


def test_the_same_tokens_in_two_kv_types_are_two_entries() -> None:
    kept = Kept()
    for namespace in (TENANT, OTHER_TYPE):
        kept.entries.remember(
            Draft(namespace=TENANT, kv_namespace=namespace, tokens=PROMPT, text=b"text")
        )
        kept.put(PROMPT, namespace)
    assert [entry.namespace for entry in kept.entries.of(TENANT)] == [TENANT, OTHER_TYPE]
    assert kept.held(PROMPT) == kept.held(PROMPT, OTHER_TYPE) == len(PROMPT)
    for entry in kept.entries.of(TENANT):
        kept.entries.remove(entry)
    assert len(kept.store) == 0


def test_an_announced_entry_takes_the_state_of_whichever_kv_type_is_computed() -> None:
    kept = Kept()
    announced = kept.entries.remember(
        Draft(namespace=TENANT, tokens=PROMPT, keyed=True, is_computed=False)
    )
    computed = kept.entries.remember(
        Draft(namespace=TENANT, kv_namespace=OTHER_TYPE, tokens=PROMPT)
    )
    assert announced is computed
    assert kept.entries.index.by_tokens(OTHER_TYPE, PROMPT) is computed
    assert kept.entries.index.by_tokens(TENANT, PROMPT) is None
