"""Remembers conversations as entries: their names, their lifetimes, and their rows in the index.

All names of one conversation lead to one entry.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from rekindle.kvcache.disk.entry_table import Change, DropEntry, EntryRow, PutEntry, TouchEntry
from rekindle.kvcache.entries.entry import (
    Clock,
    Draft,
    Entry,
    Name,
    decode_replies,
    encode_replies,
)
from rekindle.kvcache.entries.index import EntryIndex
from rekindle.kvcache.store import Store
from rekindle.tokens import Tokens


class EntryBudget:
    """The memory limit of all entries: tokens, text, replies and documents. State is not
    included."""

    def __init__(self, index: EntryIndex, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._index = index

    def could_fit(self, cost_bytes: int) -> bool:
        """Whether the cost would fit without any other entry."""
        return cost_bytes <= self.limit_bytes

    @property
    def has_room(self) -> bool:
        """Whether forgetting unpinned entries could make room for one more."""
        pinned = sum(entry.cost_bytes for entry in self._index.of(None) if entry.pinned)
        return pinned < self.limit_bytes

    def enforce(self, forget: Callable[[Entry], None]) -> None:
        """Forget entries until the rest fits. The largest tenant gives way first: its unnamed
        entries, oldest first, then the others."""
        index, limit_bytes = self._index, self.limit_bytes
        if index.used_bytes <= limit_bytes:
            return
        share = limit_bytes // len(index.held_bytes)
        for namespace, _ in index.held_bytes.most_common():
            unpinned = [entry for entry in index.of(namespace) if not entry.pinned]
            unpinned.sort(key=lambda entry: not entry.is_free)  # stable, so the oldest stay first
            for entry in unpinned:
                if index.used_bytes <= limit_bytes or index.held_bytes[namespace] <= share:
                    break
                forget(entry)


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
        pinned=entry.is_pinned_for_good,
        hits=entry.hits,
        keyed=entry.keyed,
        names=tuple(entry.names),
        text_tokens=None if entry.text_tokens == len(entry.tokens) else entry.text_tokens,
        replies=encode_replies(entry.replies),
        document=entry.document,
    )


def from_row(row: EntryRow, clock: Clock) -> Entry:
    """The entry without its names and replies."""
    namespace, tokens = row.kv_namespace or row.namespace, Tokens(row.packed)
    entry = Entry(row.key, namespace, tokens, row.text, clock, tenant=row.namespace)
    entry.segments = row.segments
    entry.document = row.document
    entry.created_at, entry.last_used_at = row.created_at, row.last_used_at
    entry.hits, entry.keyed, entry.pinned = row.hits, row.keyed, row.pinned
    entry.ttl_s = row.ttl_s
    entry.used_s -= _age_s(row, clock)
    if row.text_tokens is not None:
        entry.text_tokens = row.text_tokens
    return entry


def _age_s(row: EntryRow, clock: Clock) -> float:
    """Time since the last use by the wall clock. That clock may have jumped, so every entry lives
    for at least five minutes after a restart."""
    age = max(clock.wall_s() - row.last_used_at, 0.0)
    return age if row.ttl_s is None else min(age, max(row.ttl_s - 300.0, 0.0))


__all__ = ["Draft", "Entries", "Entry", "Name"]


class Entries:
    """Decides what is remembered and for how long. Called from the engine's thread; other threads
    may read `index`."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        journal: Callable[[Change], None] | None = None,
        *,
        limit_bytes: int = 64 << 20,
        on_remove: Callable[[Entry], None] = lambda _entry: None,
    ) -> None:
        """`on_remove` is called with an entry whose state outside the store has to be removed."""
        self.index = EntryIndex()
        self.budget = EntryBudget(self.index, limit_bytes)
        self._on_remove = on_remove
        self._conversations = store.conversations
        self._clock = clock
        self._journal = journal or (lambda _change: None)
        self._removed_early: list[Entry] | None = None  # while blocks are being loaded
        self._expired: OrderedDict[tuple[bytes, str], None] = OrderedDict()

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
        key, unless the draft has its own. Returns None if it is too large."""
        equal = self.index.by_tokens(draft.namespace, draft.tokens)
        entry = equal if draft.key is None else self.index.by_key(draft.namespace, draft.key)
        if entry is not None and entry.has_expired(self._clock):
            self.remove(entry)
            entry = None
        if entry is None:
            entry = _new_entry(draft, self._clock)
            reply_bytes = sum(reply.cost_bytes for reply in draft.replies)
            if not self.budget.could_fit(entry.cost_bytes + reply_bytes):
                return None
            self.index.add(entry)
            self._conversations.attach(entry)
        elif entry.namespace != _kv_namespace(draft) and (draft.pinned or not entry.pinned):
            self._conversations.move(
                entry, _kv_namespace(draft)
            )  # computed again with another KV type
        self.index.add_replies(entry, draft.replies if entry.text == draft.text else ())
        _update(entry, draft)
        if draft.pin_s is not None:
            entry.pin_until(self._clock.steady_s() + draft.pin_s)
        self.index.use(entry, self._clock)
        left_behind = [self.index.set_name(entry, name) for name in draft.names]
        others = _superseded(self.index, entry, [*left_behind, draft.after, equal])
        for other in others:  # the new entry takes over temporary pins
            other.end_pin(entry.pinned_until_s or 0.0)
        # The new entry continues these conversations, so it takes over their hits.
        entry.hits += sum(other.hits for other in others if other.is_free)
        self._save(entry)  # before the others are dropped, so that the index keeps shared pieces
        for other in others:
            if other.is_free:
                self.forget(other)
            else:
                self._save(other)
        self.budget.enforce(self.forget)
        return entry

    def store(self, entry: Entry, document: bytes) -> bool:
        """Replace the document of an entry. Returns False if there is no room."""
        more_bytes = len(document) - len(entry.document)
        if not entry.place or not self.budget.could_fit(entry.cost_bytes + more_bytes):
            return False
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
        entry.pinned, entry.pinned_until_s = True, None
        self._save(entry)

    def unpin(self, entry: Entry) -> None:
        """Unpin an entry and restart its lifetime."""
        entry.pinned, entry.pinned_until_s = False, None
        self.index.use(entry, self._clock)
        self._save(entry)

    def remove(self, entry: Entry) -> int:
        """Delete an entry and the state that no other one uses. Returns the bytes freed."""
        self.index.remove(entry)
        self._drop(entry)
        self._on_remove(entry)
        if self._removed_early is not None:
            self._removed_early.append(entry)
        return self._conversations.release(entry)

    def forget(self, entry: Entry) -> None:
        """Delete an entry. Its state stays until it is evicted."""
        self.index.remove(entry)
        self._drop(entry)
        self._conversations.detach(entry)

    def collect(self, namespace: bytes | None = None) -> tuple[int, int]:
        """Delete expired entries. Returns their number and the bytes freed."""
        offered = (self.expire(entry) for entry in self.index.of(namespace))
        freed = [freed_bytes for freed_bytes in offered if freed_bytes is not None]
        return len(freed), sum(freed)

    def expire(self, entry: Entry) -> int | None:
        """End a temporary pin that is over, and delete the entry if it has expired. Returns the
        bytes freed, or None if it has not expired."""
        entry.end_pin(self._clock.steady_s())
        if not entry.has_expired(self._clock):
            return None
        self._expired[entry.tenant, entry.key] = None
        while len(self._expired) > 10_000:
            self._expired.popitem(last=False)
        return self.remove(entry)

    def _save(self, entry: Entry) -> None:
        if entry.durable:
            self._journal(PutEntry(_to_row(entry, self._clock)))

    def _save_use(self, entry: Entry) -> None:
        if entry.durable:
            expires_at = entry.expires_at(self._clock)
            self._journal(TouchEntry(entry.key, entry.last_used_at, expires_at, entry.hits))

    def _drop(self, entry: Entry) -> None:
        if entry.durable:
            self._journal(DropEntry(entry.key))

    def load(self, rows: Iterable[EntryRow]) -> None:
        """Load entries after a restart, before their blocks are loaded. Names that were given in
        the meantime are kept. Call `settle` when the blocks are loaded."""
        self._removed_early = []
        for row in sorted(rows, key=lambda row: row.last_used_at):
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
        removed, self._removed_early = self._removed_early or [], None
        for entry in removed:
            self._conversations.attach(entry)
            self._conversations.release(entry)
        self.budget.enforce(self.forget)  # the limit may be smaller than before


def _living(entry: Entry | None, clock: Clock) -> Entry | None:
    return None if entry is None or entry.has_expired(clock) else entry


def _new_entry(draft: Draft, clock: Clock) -> Entry:
    key = draft.key or secrets.token_hex(16)
    namespace, tenant = _kv_namespace(draft), draft.namespace
    entry = Entry(key, namespace, draft.tokens, draft.text, clock, tenant=tenant)
    if draft.text_tokens is not None:
        entry.text_tokens = draft.text_tokens
    entry.durable, entry.was_computed = draft.durable, draft.is_computed
    return entry


def _superseded(index: EntryIndex, entry: Entry, left_behind: Iterable[Entry | None]) -> set[Entry]:
    """Entries that this one continues, or that have lost their name to it."""
    shorter = index.recall(entry.tenant, entry.text[:-1]) if entry.text else None
    if shorter and shorter.text_tokens < len(shorter.tokens):
        # Its text covers only the prompt, so it is superseded only if its tokens are a prefix.
        shorter = shorter if entry.tokens.startswith(shorter.tokens) else None
    return {other for other in (*left_behind, shorter) if other not in (None, entry)}


def _kv_namespace(draft: Draft) -> bytes:
    return draft.kv_namespace or draft.namespace


def _update(entry: Entry, draft: Draft) -> None:
    entry.segments = draft.segments or entry.segments
    entry.keyed |= draft.keyed
    entry.was_computed |= draft.is_computed
    entry.durable |= draft.durable
    if draft.pinned:
        entry.pinned, entry.pinned_until_s = True, None
    if draft.ttl_s is not None or draft.pinned:
        entry.ttl_s = draft.ttl_s
