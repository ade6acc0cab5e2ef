"""Entries in the index on disk: what is written of them, and what comes back after a restart."""

from __future__ import annotations

from collections.abc import Callable

from rekindle.kvcache.disk.index_db import Change, DropEntry, EntryRow, PutEntry, TouchEntry
from rekindle.kvcache.entry import Clock, Entry, encode_replies
from rekindle.tokens import Tokens

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
