"""Entries: conversations that are remembered, what clients call them, and how long they live.

All names of one conversation lead to one entry.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from rekindle.kvcache.disk.index_db import Change, DropEntry, EntryRow, PutEntry, TouchEntry
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

# ----------------------------------------------------------------------
# The memory that entries may take together, and which give way when it is full.


class EntryBudget:
    """Tokens, text, replies and documents; state is the tiers' (`tiers/budget.py`)."""

    def __init__(self, index: EntryIndex, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._index = index

    def could_fit(self, cost_bytes: int) -> bool:
        """Whether so much would fit if nothing else were here."""
        return cost_bytes <= self.limit_bytes

    @property
    def has_room(self) -> bool:
        """Whether something else could make room for one more."""
        pinned = sum(entry.cost_bytes for entry in self._index.of(None) if entry.pinned)
        return pinned < self.limit_bytes

    def enforce(self, forget: Callable[[Entry], None]) -> None:
        """Have entries forgotten until the rest is within bounds. The tenant that has most gives
        way: its oldest that nobody named, then its oldest."""
        index, limit_bytes = self._index, self.limit_bytes
        if index.used_bytes <= limit_bytes:
            return
        share = limit_bytes // len(index.held_bytes)
        for namespace, _ in index.held_bytes.most_common():
            unpinned = [entry for entry in index.of(namespace) if not entry.pinned]
            unpinned.sort(key=lambda entry: not entry.is_free)  # stable: the oldest stay first
            for entry in unpinned:
                if index.used_bytes <= limit_bytes or index.held_bytes[namespace] <= share:
                    break
                forget(entry)


# ----------------------------------------------------------------------
# Entries in the index on disk: what is written of them, and what comes back after a restart.

GRACE_S = 300.0  # what an entry lives at least after a restart: the wall clock may have jumped


class EntryJournal:
    """Changes of durable entries, to be written to the index."""

    def __init__(self, write: Callable[[Change], None], clock: Clock) -> None:
        self._write = write
        self._clock = clock

    def save(self, entry: Entry) -> None:
        if entry.durable:
            self._write(PutEntry(_to_row(entry, self._clock)))

    def touch(self, entry: Entry) -> None:
        if entry.durable:
            expires_at = entry.expires_at(self._clock)
            self._write(TouchEntry(entry.key, entry.last_used_at, expires_at, entry.hits))

    def drop(self, entry: Entry) -> None:
        if entry.durable:
            self._write(DropEntry(entry.key))


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
    """The entry, but for its names and replies."""
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
    """How long ago it was used, by the wall clock; that may have jumped, so an entry is never so
    old that it has less than a little time left."""
    age = max(clock.wall_s() - row.last_used_at, 0.0)
    return age if row.ttl_s is None else min(age, max(row.ttl_s - GRACE_S, 0.0))


__all__ = ["Draft", "Entries", "Entry", "Name"]

KEY_BYTES = 16  # of randomness in a cache key
MOST_EXPIRED = 10_000  # keys remembered as expired, to say so


class Entries:
    """Decides what is remembered and for how long. Called by the engine's thread; other threads
    may look into `index`."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        journal: Callable[[Change], None] | None = None,
        *,
        limit_bytes: int = 64 << 20,
    ) -> None:
        self.index = EntryIndex()
        self.budget = EntryBudget(self.index, limit_bytes)
        #: Called with an entry whose state is to go, for state that the store does not hold.
        self.on_remove: Callable[[Entry], None] = lambda _entry: None
        self._conversations = store.conversations
        self._clock = clock
        self._journal = EntryJournal(journal or (lambda _change: None), clock)
        self._removed_early: list[Entry] | None = None  # while blocks are still being read
        self._expired: OrderedDict[tuple[bytes, str], None] = OrderedDict()

    def __len__(self) -> int:
        return len(self.index)

    # -- looking -------------------------------------------------------------------------------

    def of(self, namespace: bytes | None) -> list[Entry]:
        """A tenant's living entries, or everybody's."""
        return [entry for entry in self.index.of(namespace) if not entry.has_expired(self._clock)]

    def newest(self, namespace: bytes | None, before: int | None) -> Iterator[Entry]:
        """Living entries from below a place in the order of use on, the newest use first."""
        found = self.index.newest(namespace, before)
        return (entry for entry in found if not entry.has_expired(self._clock))

    def by_key(self, namespace: bytes | None, key: str) -> Entry | None:
        return _living(self.index.by_key(namespace, key), self._clock)

    def by_name(self, namespace: bytes, name: Name) -> Entry | None:
        return _living(self.index.by_name(namespace, name), self._clock)

    def has_expired(self, namespace: bytes, key: str) -> bool:
        """Whether this key once named an entry that has outlived its time."""
        entry = self.index.by_key(namespace, key)
        is_over = entry is not None and entry.has_expired(self._clock)
        return is_over or (namespace, key) in self._expired

    def is_older(self, entry: Entry, seconds: float) -> bool:
        """Whether it is alive, unpinned and was not used for so long."""
        unused_s = self._clock.steady_s() - entry.used_s
        return not entry.pinned and unused_s > seconds and not entry.has_expired(self._clock)

    # -- remembering ---------------------------------------------------------------------------

    def remember(self, draft: Draft) -> Entry | None:
        """Name the end of a conversation. An equal one is the same entry and keeps its key, unless
        this one has a key of its own. None: it is too large."""
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
            self._conversations.move(entry, _kv_namespace(draft))  # computed again, in other cells
        self.index.add_replies(entry, draft.replies if entry.text == draft.text else ())
        _update(entry, draft)
        if draft.pin_s is not None:
            entry.pin_until(self._clock.steady_s() + draft.pin_s)
        self.index.use(entry, self._clock)
        left_behind = [self.index.set_name(entry, name) for name in draft.names]
        others = _superseded(self.index, entry, [*left_behind, draft.after, equal])
        for other in others:  # what they are pinned for, this one is
            other.end_pin(entry.pinned_until_s or 0.0)
        # It is the same conversation as these, a turn later.
        entry.hits += sum(other.hits for other in others if other.is_free)
        self._journal.save(entry)  # before what it goes on from: the index keeps what they share
        for other in others:
            if other.is_free:
                self.forget(other)
            else:
                self._journal.save(other)
        self.budget.enforce(self.forget)
        return entry

    def store(self, entry: Entry, document: bytes) -> bool:
        """Keep a document with an entry, instead of the one it has; whether there is room."""
        more_bytes = len(document) - len(entry.document)
        if not entry.place or not self.budget.could_fit(entry.cost_bytes + more_bytes):
            return False
        self.index.set_document(entry, document)
        self.index.use(entry, self._clock)
        self._journal.save(entry)
        self.budget.enforce(self.forget)
        return bool(entry.place)

    def touch(self, entry: Entry) -> None:
        """Its time begins again."""
        self.index.use(entry, self._clock)
        self._journal.touch(entry)

    def count_hit(self, entry: Entry) -> None:
        """A turn reused its state."""
        entry.hits += 1
        self._journal.touch(entry)

    def pin(self, entry: Entry) -> None:
        entry.pinned, entry.pinned_until_s = True, None
        self._journal.save(entry)

    def unpin(self, entry: Entry) -> None:
        """Its time, if it has one, begins now."""
        entry.pinned, entry.pinned_until_s = False, None
        self.index.use(entry, self._clock)
        self._journal.save(entry)

    # -- forgetting ----------------------------------------------------------------------------

    def remove(self, entry: Entry) -> int:
        """Forget an entry and the state that is no other's; the bytes freed."""
        self.index.remove(entry)
        self._journal.drop(entry)
        self.on_remove(entry)
        if self._removed_early is not None:
            self._removed_early.append(entry)
        return self._conversations.release(entry)

    def forget(self, entry: Entry) -> None:
        """Forget an entry; its state stays until room is needed."""
        self.index.remove(entry)
        self._journal.drop(entry)
        self._conversations.detach(entry)

    def collect(self, namespace: bytes | None = None) -> tuple[int, int]:
        """Remove what has expired; how many entries, and the bytes freed."""
        offered = (self.expire(entry) for entry in self.index.of(namespace))
        freed = [freed_bytes for freed_bytes in offered if freed_bytes is not None]
        return len(freed), sum(freed)

    def expire(self, entry: Entry) -> int | None:
        """Remove an entry that has outlived its time; the bytes freed, None if it has not. A pin
        that was for a while may end."""
        entry.end_pin(self._clock.steady_s())
        if not entry.has_expired(self._clock):
            return None
        self._expired[entry.tenant, entry.key] = None
        while len(self._expired) > MOST_EXPIRED:
            self._expired.popitem(last=False)
        return self.remove(entry)

    # -- after a restart -----------------------------------------------------------------------

    def load(self, rows: Iterable[EntryRow]) -> None:
        """Take in what was remembered, though the blocks it rests on are still being read; `settle`
        when they are. What was named in the meantime keeps its name."""
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
        """Let entries rest on their blocks, and remove the state of those that are gone already."""
        for entry in self.index.of(None):
            if entry.block is None:
                self._conversations.attach(entry)
        removed, self._removed_early = self._removed_early or [], None
        for entry in removed:
            self._conversations.attach(entry)
            self._conversations.release(entry)
        self.budget.enforce(self.forget)  # the budget may have become smaller


def _living(entry: Entry | None, clock: Clock) -> Entry | None:
    return None if entry is None or entry.has_expired(clock) else entry


def _new_entry(draft: Draft, clock: Clock) -> Entry:
    key = draft.key or secrets.token_hex(KEY_BYTES)
    namespace, tenant = _kv_namespace(draft), draft.namespace
    entry = Entry(key, namespace, draft.tokens, draft.text, clock, tenant=tenant)
    if draft.text_tokens is not None:
        entry.text_tokens = draft.text_tokens
    entry.durable, entry.was_computed = draft.durable, draft.is_computed
    return entry


def _superseded(index: EntryIndex, entry: Entry, left_behind: Iterable[Entry | None]) -> set[Entry]:
    """Entries that this one goes on from, or that have lost their name to it; of those that are
    free nothing is needed any more."""
    shorter = index.recall(entry.tenant, entry.text[:-1]) if entry.text else None
    if shorter and shorter.text_tokens < len(shorter.tokens):
        # Its text is not all of it: another reply to the same prompt leaves it as it is.
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
