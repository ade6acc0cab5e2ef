"""Remembers conversations as entries: their names, their lifetimes, and their rows in the index.

All names of one conversation lead to one entry.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from rekindle.kvcache.block import Block, PrefixHandle, chain_tokens
from rekindle.kvcache.disk.entry_table import Change, DropEntry, EntryRow, TouchEntry
from rekindle.kvcache.entries.entry import (
    Clock,
    Draft,
    Entry,
    Name,
    decode_replies,
    encode_replies,
)
from rekindle.kvcache.entries.index import EntryIndex
from rekindle.kvcache.entries.retention import EntryBudget, EntryLimits, PinnedBlocks, Retention
from rekindle.kvcache.store import Store
from rekindle.tokens import Tokens


def _to_row(entry: Entry, clock: Clock) -> EntryRow:
    return EntryRow(
        key=entry.key,
        namespace=entry.tenant,
        kv_namespace=None if entry.namespace == entry.tenant else entry.namespace,
        packed=entry.tokens.packed,
        text=entry.text,
        segments=entry.segments,
        created_at=entry.created_at,
        last_used_at=entry.last_used_at,
        ttl_s=entry.ttl_s,
        expires_at=entry.expires_at(clock),
        pinned=entry.has_own_pin,
        hits=entry.hits,
        keyed=entry.keyed,
        names=tuple(entry.names),
        text_tokens=None if entry.text_tokens == len(entry.tokens) else entry.text_tokens,
        replies=encode_replies(entry.replies),
        document=entry.document,
        pictures=entry.pictures,
    )


def from_row(row: EntryRow, clock: Clock) -> Entry:
    """The entry without its names and replies."""
    tokens = Tokens(row.packed)
    return Entry(
        row.kv_namespace or row.namespace,
        tokens,
        tenant=row.namespace,
        key=row.key,
        text=row.text,
        text_tokens=len(tokens) if row.text_tokens is None else row.text_tokens,
        segments=row.segments,
        document=row.document,
        pictures=row.pictures,
        created_at=row.created_at,
        last_used_at=row.last_used_at,
        used_s=clock.steady_s() - _age_s(row, clock),
        hits=row.hits,
        keyed=row.keyed,
        pinned=row.pinned,
        pin_expires=row.pinned and row.expires_at is not None,
        ttl_s=row.ttl_s,
    )


def _age_s(row: EntryRow, clock: Clock) -> float:
    """Time since the last use by the wall clock. That clock may have jumped, so every entry lives
    for at least five minutes after a restart."""
    age = max(clock.wall_s() - row.last_used_at, 0.0)
    return age if row.ttl_s is None else min(age, max(row.ttl_s - 300.0, 0.0))


__all__ = ["Draft", "Entries", "Entry", "Name"]


# Entries that one enforcement of a tenant's limit forgets at most, so that turns do not wait long.
MAX_FORGOTTEN = 64


class Entries:
    """Decides what is remembered and for how long. Called from the engine's thread; other threads
    may read `index`."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        journal: Callable[[Change], None] | None = None,
        limits: EntryLimits | None = None,
        *,
        on_remove: Callable[[Entry], None] = lambda _entry: None,
        on_forget: Callable[[Entry], None] = lambda _entry: None,
    ) -> None:
        """State outside the store has to be freed with an entry. `on_remove` is called with an
        entry that was deleted or has expired, and `on_forget` with one that was superseded or did
        not fit."""
        limits = limits or EntryLimits()
        self.retention = Retention(PinnedBlocks(store.tiers, store.block_tokens, limits))
        self.index = EntryIndex(self.retention)
        self.budget = EntryBudget(self.retention, limits.memory_bytes)
        self._on_remove = on_remove
        self._on_forget = on_forget
        self._conversations = store.conversations
        self._clock = clock
        self._journal = journal or (lambda _change: None)
        self._expired: OrderedDict[tuple[bytes, str], None] = OrderedDict()
        self.cache_limits: dict[bytes, int] = {}  # by tenant

    def __len__(self) -> int:
        return len(self.index)

    def of(self, namespace: bytes | None) -> list[Entry]:
        """The living entries of a tenant, or of all tenants."""
        return [entry for entry in self.index.of(namespace) if not entry.has_expired(self._clock)]

    def newest(self, namespace: bytes | None, before: int | None) -> Iterator[Entry]:
        """Living entries below a position in the LRU order, most recently used first."""
        found = self.index.newest(namespace, before)
        return (entry for entry in found if not entry.has_expired(self._clock))

    def by_key(self, namespace: bytes | None, key: str) -> Entry | None:
        return _living(self.index.by_key(namespace, key), self._clock)

    def by_name(self, namespace: bytes, name: Name) -> Entry | None:
        return _living(self.index.by_name(namespace, name), self._clock)

    def has_expired(self, namespace: bytes, key: str) -> bool:
        """Whether this key belonged to an entry that has expired."""
        entry = self.index.by_key(namespace, key)
        is_over = entry is not None and entry.has_expired(self._clock)
        return is_over or (namespace, key) in self._expired

    def is_older(self, entry: Entry, seconds: float) -> bool:
        """Whether it is alive, unpinned, and unused for longer than `seconds`."""
        unused_s = self._clock.steady_s() - entry.used_s
        return not entry.pinned and unused_s > seconds and not entry.has_expired(self._clock)

    def remember(self, draft: Draft) -> Entry | None:
        """Remember the end of a conversation. One with equal tokens is the same entry and keeps its
        key, unless the draft has its own. Returns None if there is no room."""
        equal = self._with_equal_tokens(draft)
        entry = equal if draft.key is None else self.index.by_key(draft.namespace, draft.key)
        if entry is not None and entry.has_expired(self._clock):
            self.expire(entry)
            entry = None
        if entry is None:
            entry = _new_entry(draft, self._clock)
            reply_bytes = sum(reply.cost_bytes for reply in draft.replies)
            if not self.budget.could_fit(entry.cost_bytes + reply_bytes):
                return None
            self.index.add(entry)
            self._conversations.attach(entry)
        elif entry.namespace != _kv_namespace(draft) and (draft.pinned or not entry.pinned):
            self._move(entry, _kv_namespace(draft))
        elif entry.block is None:  # it is being loaded
            self._conversations.attach(entry)
        self.index.add_replies(entry, draft.replies if entry.text == draft.text else ())
        _update(entry, draft)
        if draft.pin_s is not None:
            entry.pin_until(self._clock.steady_s() + draft.pin_s)
        self.index.use(entry, self._clock)
        # A name of one conversation stands for the new one from now on, whatever it was before. A
        # shared name leaves the earlier conversation as it was.
        replaced = {self.index.set_name(entry, name) for name in draft.names}
        renamed = {self.index.set_name(entry, name) for name in draft.shared_names}
        superseded = {draft.after, equal, *self._continued(entry, renamed), *replaced}
        known = {other for other in superseded if other is not None and other.place}
        self._supersede(entry, known - {entry}, renamed)
        self.budget.enforce(self.forget)
        return entry if entry.place else None

    def _with_equal_tokens(self, draft: Draft) -> Entry | None:
        """The entry with the same tokens and state of the same KV type, or one that was announced
        and not computed yet. The same tokens in two KV types are two entries."""
        equal = self.index.by_tokens(_kv_namespace(draft), draft.tokens)
        announced = self.index.by_tokens(draft.namespace, draft.tokens)
        if equal is None and announced is not None and not announced.was_computed:
            return announced
        return equal

    def _move(self, entry: Entry, namespace: bytes) -> None:
        """An entry was computed with another KV type, so its state is in another namespace now."""
        self.index.before_move(entry)
        self._conversations.move(entry, namespace)
        self.index.after_move(entry)

    def _continued(self, entry: Entry, renamed: Iterable[Entry | None]) -> Iterator[Entry]:
        """Entries that this one continues: the one with the longest text, those without a text
        whose end is on its path in the store, and those of the renamed ones that it begins with."""
        shorter = self.index.recall(entry.tenant, entry.text[:-1]) if entry.text else None
        # A text may cover only the prompt. Then the tokens decide.
        if shorter and shorter.text_tokens == len(shorter.tokens):
            yield shorter
        on_path = self._conversations.continued(entry)
        textless = (other for other in on_path if isinstance(other, Entry) and not other.text)
        for other in (shorter, *renamed, *textless):
            if other is not None and entry.tokens.startswith(other.tokens):
                yield other

    def _supersede(self, entry: Entry, others: set[Entry], renamed: set[Entry | None]) -> None:
        """Free superseded entries that nobody can name any more, and save the others."""
        for other in others:  # the new entry takes over temporary pins
            other.end_pin(entry.pinned_until_s or 0.0)
            self.retention.update(other)
        # The new entry continues these conversations, so it takes over their hits.
        entry.hits += sum(other.hits for other in others if other.is_free)
        self._save(entry)  # before the others are dropped, so that the index keeps shared pieces
        for other in others:
            if other.is_free:
                self.forget(other)
        for changed in {*others, *renamed}:
            if changed is not None and changed.place:
                self._save(changed)

    def store(self, entry: Entry, document: bytes) -> bool:
        """Replace the document of an entry. Returns False if there is no room. An entry whose
        document is too large for a temporary pin loses the pin."""
        more_bytes = len(document) - len(entry.document)
        if not entry.place or not self.budget.could_fit(entry.cost_bytes + more_bytes):
            return False
        if entry.pinned and not self.budget.can_pin(entry.tenant, more_bytes):
            if entry.pinned_until_s is None:
                return False
            entry.end_pin(entry.pinned_until_s)
        self.index.set_document(entry, document)
        self.index.use(entry, self._clock)
        self._save(entry)
        self.budget.enforce(self.forget)
        return bool(entry.place)

    def touch(self, entry: Entry) -> None:
        """Restart its lifetime."""
        self.index.use(entry, self._clock)
        self._save_use(entry)

    def count_hit(self, entry: Entry) -> None:
        """Record that a turn reused its state."""
        entry.hits += 1
        self._save_use(entry)

    def pin(self, entry: Entry) -> None:
        """Pin an entry for good."""
        entry.pin(expires=False)
        self.retention.update(entry)
        self._save(entry)

    def unpin(self, entry: Entry) -> None:
        """Unpin an entry and restart its lifetime."""
        entry.unpin()
        self.index.use(entry, self._clock)
        self._save(entry)

    def remove(self, entry: Entry) -> int:
        """Delete an entry and the state that no other one uses. Returns the bytes freed."""
        freed_bytes = self._free(entry, erased=True)
        self._on_remove(entry)
        return freed_bytes

    def forget(self, entry: Entry) -> None:
        """Delete an entry that nobody misses, and the state that no other one uses."""
        self._free(entry)
        self._on_forget(entry)

    def forget_tenant(self, tenant: bytes) -> None:
        """Forget the expired keys and the limit of a tenant whose entries were removed."""
        for name in [name for name in self._expired if name[0] == tenant]:
            del self._expired[name]
        self.cache_limits.pop(tenant, None)

    def set_cache_limit(self, tenant: bytes, limit_bytes: int | None) -> None:
        """Limit the state and the entries of a tenant together. None: no limit of its own."""
        if limit_bytes is None:
            self.cache_limits.pop(tenant, None)
        else:
            self.cache_limits[tenant] = limit_bytes

    def enforce_cache_limits(self) -> None:
        """Forget unpinned entries of tenants that exceed their limit, least recently used first."""
        for tenant, limit_bytes in self.cache_limits.items():
            forgotten = 0
            while self._used_bytes(tenant) > limit_bytes and forgotten < MAX_FORGOTTEN:
                victim = self.retention.next_of(tenant)
                if victim is None:
                    break
                self.forget(victim)
                forgotten += 1

    def _used_bytes(self, tenant: bytes) -> int:
        return self._conversations.size_bytes(tenant) + self.retention.held_bytes[tenant]

    def _free(self, entry: Entry, *, erased: bool = False) -> int:
        self.index.remove(entry)
        self._drop(entry, erased=erased)
        return self._conversations.release(entry)

    def collect(self) -> tuple[int, int]:
        """Delete all expired entries now. Returns their number and the bytes freed."""
        freed = [freed_bytes for _, freed_bytes in self.expire_due() if freed_bytes is not None]
        return len(freed), sum(freed)

    def expire_due(self) -> Iterator[tuple[Entry, int | None]]:
        """Look at each entry that may have expired or whose temporary pin may be over. Yields it
        with the bytes freed, or with None if it stays."""
        now_s = self._clock.steady_s()
        while (key := self.retention.expiries.pop_due(now_s)) is not None:
            entry = self.index.by_key(None, key)
            if entry is not None:
                yield entry, self.expire(entry)

    def expire(self, entry: Entry) -> int | None:
        """End a temporary pin that is over, and delete the entry if it has expired. Returns the
        bytes freed, or None if it has not expired."""
        entry.end_pin(self._clock.steady_s())
        self.retention.update(entry)
        if not entry.has_expired(self._clock):
            return None
        self._expired[entry.tenant, entry.key] = None
        while len(self._expired) > 10_000:
            self._expired.popitem(last=False)
        freed_bytes = self._free(entry)
        self._on_remove(entry)
        return freed_bytes

    def _save(self, entry: Entry) -> None:
        if entry.durable:
            self._journal(_to_row(entry, self._clock))

    def _save_use(self, entry: Entry) -> None:
        if entry.durable:
            expires_at = entry.expires_at(self._clock)
            self._journal(TouchEntry(entry.key, entry.last_used_at, expires_at, entry.hits))

    def _drop(self, entry: Entry, *, erased: bool) -> None:
        if entry.durable:
            self._journal(DropEntry(entry.key, erased))

    def load(self, rows: Iterable[EntryRow]) -> None:
        """Load entries after a restart, before their blocks are loaded. Names that were given in
        the meantime are kept, and so are entries with the same key. Call `settle` when the blocks
        are loaded."""
        self._conversations.begin_loading()
        for row in sorted(rows, key=lambda row: row.last_used_at):
            if self.index.by_key(None, row.key) is not None:
                continue
            entry = from_row(row, self._clock)
            self.index.add(entry)
            self._conversations.claim(entry)
            self.index.add_replies(entry, decode_replies(row.replies))
            for name in row.names:
                if self.index.by_name(entry.tenant, name) is None:
                    self.index.set_name(entry, name)

    def settle(self) -> None:
        """Attach entries to their blocks, and remove the state of entries deleted in the
        meantime."""
        for entry in self.index.of(None):
            if entry.block is None:
                self._conversations.attach(entry)
        self._conversations.end_loading()
        self.budget.enforce(self.forget)  # the limit may be smaller than before

    def adopt(self) -> Iterator[None]:
        """Make an entry for state that was loaded and that no entry uses, so that clients can see
        and delete it. State is freed if there is no room for its entry. Yields after each block."""
        for block in self._conversations.unreached():
            if block is not None:
                self._adopt(block)
            yield

    def _adopt(self, block: Block) -> None:
        draft = Draft(
            namespace=block.tenant,
            kv_namespace=block.namespace,
            tokens=chain_tokens(block),
            durable=block.is_persistent,
        )
        cost_bytes = _new_entry(draft, self._clock).cost_bytes
        has_room = self.retention.used_bytes + cost_bytes <= self.budget.limit_bytes
        if has_room and self.index.by_tokens(block.namespace, draft.tokens) is None:
            self.remember(draft)
            return
        handle = PrefixHandle(block.namespace, draft.tokens, tenant=block.tenant)
        self._conversations.attach(handle)
        self._conversations.release(handle)


def _living(entry: Entry | None, clock: Clock) -> Entry | None:
    return None if entry is None or entry.has_expired(clock) else entry


def _new_entry(draft: Draft, clock: Clock) -> Entry:
    now = clock.wall_s()
    return Entry(
        _kv_namespace(draft),
        draft.tokens,
        tenant=draft.namespace,
        key=draft.key or secrets.token_hex(16),
        text=draft.text,
        text_tokens=len(draft.tokens) if draft.text_tokens is None else draft.text_tokens,
        pictures=draft.tokens.pictures,
        created_at=now,
        last_used_at=now,
        used_s=clock.steady_s(),
        durable=draft.durable,
        was_computed=draft.is_computed,
    )


def _kv_namespace(draft: Draft) -> bytes:
    return draft.kv_namespace or draft.namespace


def _update(entry: Entry, draft: Draft) -> None:
    entry.segments = draft.segments or entry.segments
    entry.keyed |= draft.keyed
    entry.was_computed |= draft.is_computed
    entry.durable |= draft.durable
    if draft.pinned:
        entry.pin(expires=draft.ttl_s is not None)
    if draft.ttl_s is not None or draft.pinned:
        entry.ttl_s = draft.ttl_s
