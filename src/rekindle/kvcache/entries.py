"""Entries: conversations that are remembered, what clients call them, and how long they live.

All names of one conversation lead to one entry.
"""

from __future__ import annotations

import secrets
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable

from rekindle.kvcache import replies
from rekindle.kvcache.clock import Clock
from rekindle.kvcache.disk.index_db import Change, DropEntry, EntryRow, PutEntry, TouchEntry
from rekindle.kvcache.entry import Draft, Entry, Name
from rekindle.kvcache.replies import Replies, Reply
from rekindle.kvcache.store import Store
from rekindle.kvcache.texts import Texts
from rekindle.tokens import Tokens

__all__ = ["Draft", "Entries", "Entry", "Name"]

KEY_BYTES = 16  # of randomness in a cache key
GRACE_S = 300.0  # what an entry lives at least after a restart: the wall clock may have jumped
MOST_NAMES = 32  # of one entry; the oldest goes when a client makes up another
MOST_EXPIRED = 10_000  # keys remembered as expired, to say so


class Entries:
    """Called by the engine's thread; `recall` and `replies` by any."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        journal: Callable[[Change], None] | None = None,
        *,
        limit_bytes: int = 64 << 20,
    ) -> None:
        self._store = store
        self._clock = clock
        self._journal = journal or (lambda _change: None)
        #: Called with an entry whose state is to go, for state that the store does not hold.
        self.on_remove: Callable[[Entry], None] = lambda _entry: None
        self._limit_bytes = limit_bytes
        self._used_bytes = 0
        self._held_bytes: Counter[bytes] = Counter()  # by tenant
        self._by_key: OrderedDict[tuple[bytes, str], Entry] = OrderedDict()  # oldest use first
        self._by_name: dict[tuple[bytes, Name], Entry] = {}
        self._by_tokens: dict[tuple[bytes, Tokens], Entry] = {}
        self._texts: dict[bytes, Texts[Entry]] = {}
        self._replies: dict[bytes, Replies[Entry]] = {}
        self._recall_lock = threading.Lock()  # around these two
        self._expired: OrderedDict[tuple[bytes, str], None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_key)

    # -- looking -------------------------------------------------------------------------------

    def of(self, namespace: bytes | None) -> list[Entry]:
        """A tenant's living entries, or everybody's."""
        return [entry for entry in self._all(namespace) if not self._has_expired(entry)]

    def _all(self, namespace: bytes | None) -> list[Entry]:
        return [entry for entry in self._by_key.values() if namespace in (None, entry.namespace)]

    def any_by_key(self, namespace: bytes | None, key: str) -> Entry | None:
        """Expired or not."""
        if namespace is not None:
            return self._by_key.get((namespace, key))
        return next((entry for entry in self._by_key.values() if entry.key == key), None)

    def by_key(self, namespace: bytes, key: str) -> Entry | None:
        return self._living(self._by_key.get((namespace, key)))

    def by_name(self, namespace: bytes, name: Name) -> Entry | None:
        return self._living(self._by_name.get((namespace, name)))

    def _living(self, entry: Entry | None) -> Entry | None:
        return None if entry is None or self._has_expired(entry) else entry

    def _has_expired(self, entry: Entry) -> bool:
        left = entry.expires_in_s(self._clock)
        return left is not None and left <= 0

    def has_expired(self, namespace: bytes, key: str) -> bool:
        """Whether this key once named an entry that has outlived its time."""
        entry = self._by_key.get((namespace, key))
        return (namespace, key) in self._expired or (entry is not None and self._has_expired(entry))

    def recall(self, namespace: bytes, text: bytes) -> Entry | None:
        """The longest conversation whose rendered bytes `text` begins with. Any thread."""
        with self._recall_lock:
            texts = self._texts.get(namespace)
            return texts.longest(text) if texts else None

    def replies(self, namespace: bytes, key: str) -> list[tuple[Entry, Reply]]:
        """The conversations that know a reply by this key, the newest first. Any thread."""
        with self._recall_lock:
            known = self._replies.get(namespace)
            return known.find(key) if known else []

    def knows_replies(self, namespace: bytes) -> bool:
        """Whether a tenant has any. Any thread."""
        return namespace in self._replies

    # -- remembering ---------------------------------------------------------------------------

    def remember(self, draft: Draft) -> Entry | None:
        """Name the end of a conversation. An equal one is the same entry and keeps its key. None:
        it is too large."""
        entry = self._by_tokens.get((draft.namespace, draft.tokens))
        if entry is not None and self._has_expired(entry):
            self.remove(entry)
            entry = None
        if entry is None:
            key = secrets.token_hex(KEY_BYTES)
            entry = Entry(key, draft.namespace, draft.tokens, draft.text, self._clock)
            if draft.text_tokens is not None:
                entry.text_tokens = draft.text_tokens
            reply_bytes = sum(reply.cost_bytes for reply in draft.replies)
            if entry.cost_bytes + reply_bytes > self._limit_bytes:
                return None
            entry.durable = draft.durable
            self._add(entry)
        self._learn(entry, draft.replies if entry.text == draft.text else ())
        self._update(entry, draft)
        left_behind = [self._take_name(entry, name) for name in draft.names]
        self._supersede(entry, [*left_behind, draft.after])
        self._save(entry)
        self._make_room()
        return entry

    def _update(self, entry: Entry, draft: Draft) -> None:
        entry.segments = draft.segments or entry.segments
        entry.keyed |= draft.keyed
        entry.was_computed = draft.is_computed or (entry.was_computed and entry.hits > 0)
        entry.durable |= draft.durable
        entry.pinned |= draft.pinned
        if draft.ttl_s is not None or draft.pinned:
            entry.ttl_s = draft.ttl_s
        self._use(entry)

    def _learn(self, entry: Entry, new: tuple[Reply, ...]) -> None:
        """Remember replies of an entry beside those it knows: one conversation may have been
        delivered more than once, each time with ids of its own."""
        known = replies.newest((*entry.replies, *new))
        if known == entry.replies:
            return
        cost_bytes = entry.cost_bytes
        with self._recall_lock:
            index = self._replies.setdefault(entry.namespace, Replies())
            index.drop(entry, entry.replies)
            index.put(entry, known)
        entry.replies = known
        self._used_bytes += entry.cost_bytes - cost_bytes
        self._held_bytes[entry.namespace] += entry.cost_bytes - cost_bytes

    def _take_name(self, entry: Entry, name: Name) -> Entry | None:
        """Let the name lead to this entry; the one it led to before."""
        before = self._by_name.get((entry.namespace, name))
        if before is not None and before is not entry:
            del before.names[name]
        entry.names.pop(name, None)  # named again, it is the newest
        self._add_name(entry, name)
        while len(entry.names) > MOST_NAMES:
            oldest = next(iter(entry.names))
            del entry.names[oldest], self._by_name[entry.namespace, oldest]
        return before if before is not entry else None

    def _add_name(self, entry: Entry, name: Name) -> None:
        self._by_name[entry.namespace, name] = entry
        entry.names[name] = None

    def _supersede(self, entry: Entry, left_behind: Iterable[Entry | None]) -> None:
        """Free entries that this one goes on from, or that have lost their name to it, are done."""
        shorter = self.recall(entry.namespace, entry.text[:-1]) if entry.text else None
        if shorter and shorter.text_tokens < len(shorter.tokens):
            # Its text is not all of it: another reply to the same prompt leaves it as it is.
            shorter = shorter if entry.tokens.startswith(shorter.tokens) else None
        for other in {*left_behind, shorter} - {None, entry}:
            assert other is not None
            if other.is_free:
                self.forget(other)
            else:
                self._save(other)

    def touch(self, entry: Entry) -> None:
        """Count a use; its time begins again."""
        entry.hits += 1
        self._use(entry)
        if entry.durable:
            self._journal(
                TouchEntry(entry.key, entry.last_used_at, self._expires_at(entry), entry.hits)
            )

    def _use(self, entry: Entry) -> None:
        entry.used_s = self._clock.steady_s()
        entry.last_used_at = self._clock.wall_s()
        self._by_key.move_to_end((entry.namespace, entry.key))

    def pin(self, entry: Entry) -> None:
        entry.pinned = True
        self._save(entry)

    def unpin(self, entry: Entry) -> None:
        """Its time, if it has one, begins now."""
        entry.pinned = False
        self._use(entry)
        self._save(entry)

    # -- forgetting ----------------------------------------------------------------------------

    def remove(self, entry: Entry) -> int:
        """Forget an entry and the state that is no other's; the bytes freed."""
        self._drop(entry)
        self.on_remove(entry)
        return self._store.release(entry)

    def forget(self, entry: Entry) -> None:
        """Forget an entry; its state stays until room is needed."""
        self._drop(entry)
        self._store.detach(entry)

    def collect(self, namespace: bytes | None = None) -> tuple[int, int]:
        """Remove what has expired; how many entries, and the bytes freed."""
        expired = [entry for entry in self._all(namespace) if self._has_expired(entry)]
        freed = sum(self.remove(entry) for entry in expired)
        for entry in expired:
            self._expired[entry.namespace, entry.key] = None
        while len(self._expired) > MOST_EXPIRED:
            self._expired.popitem(last=False)
        return len(expired), freed

    def older(self, namespace: bytes | None, seconds: float) -> list[Entry]:
        """Unpinned entries that were not used for so long."""
        now = self._clock.steady_s()
        return [e for e in self.of(namespace) if not e.pinned and now - e.used_s > seconds]

    def _make_room(self) -> None:
        """Keep what entries take within bounds. The tenant that has most gives way: its oldest that
        nobody named, then its oldest."""
        if self._used_bytes <= self._limit_bytes:
            return
        share = self._limit_bytes // len(self._held_bytes)
        for namespace, _ in self._held_bytes.most_common():
            unpinned = [entry for entry in self._all(namespace) if not entry.pinned]
            unpinned.sort(key=lambda entry: not entry.is_free)  # stable: the oldest stay first
            for entry in unpinned:
                if self._used_bytes <= self._limit_bytes or self._held_bytes[namespace] <= share:
                    break
                self.forget(entry)

    @property
    def has_room(self) -> bool:
        """Whether something else could make room for one more."""
        pinned = sum(entry.cost_bytes for entry in self._by_key.values() if entry.pinned)
        return pinned < self._limit_bytes

    # -- bookkeeping ---------------------------------------------------------------------------

    def _add(self, entry: Entry) -> None:
        self._by_key[entry.namespace, entry.key] = entry
        self._by_tokens[entry.namespace, entry.tokens] = entry
        self._used_bytes += entry.cost_bytes
        self._held_bytes[entry.namespace] += entry.cost_bytes
        if entry.text:
            with self._recall_lock:
                self._texts.setdefault(entry.namespace, Texts()).put(entry.text, entry)
        self._store.attach(entry)

    def _drop(self, entry: Entry) -> None:
        del self._by_key[entry.namespace, entry.key]
        if self._by_tokens.get((entry.namespace, entry.tokens)) is entry:
            del self._by_tokens[entry.namespace, entry.tokens]
        for name in entry.names:
            del self._by_name[entry.namespace, name]
        self._used_bytes -= entry.cost_bytes
        self._held_bytes[entry.namespace] -= entry.cost_bytes
        if not self._held_bytes[entry.namespace]:
            del self._held_bytes[entry.namespace]
        with self._recall_lock:
            if texts := self._texts.get(entry.namespace):
                texts.drop(entry.text, entry)
                if not len(texts):
                    del self._texts[entry.namespace]
            if known := self._replies.get(entry.namespace):
                known.drop(entry, entry.replies)
                if not len(known):
                    del self._replies[entry.namespace]
        if entry.durable:
            self._journal(DropEntry(entry.key))

    def _save(self, entry: Entry) -> None:
        if entry.durable:
            self._journal(PutEntry(self._row(entry)))

    def _expires_at(self, entry: Entry) -> float | None:
        left = entry.expires_in_s(self._clock)
        return None if left is None else self._clock.wall_s() + left

    def _row(self, entry: Entry) -> EntryRow:
        return EntryRow(
            key=entry.key,
            namespace=entry.namespace,
            packed=entry.tokens.packed,
            text=entry.text,
            segments=entry.segments,
            created_at=entry.created_at,
            last_used_at=entry.last_used_at,
            ttl_s=entry.ttl_s,
            expires_at=self._expires_at(entry),
            pinned=entry.pinned,
            hits=entry.hits,
            keyed=entry.keyed,
            names=tuple(entry.names),
            text_tokens=None if entry.text_tokens == len(entry.tokens) else entry.text_tokens,
            replies=replies.encode(entry.replies),
        )

    def _age_s(self, row: EntryRow) -> float:
        """How long ago it was used, as the wall clock has it; that may have jumped, so an entry
        is never older than leaves it a little time."""
        age = max(self._clock.wall_s() - row.last_used_at, 0.0)
        return age if row.ttl_s is None else min(age, max(row.ttl_s - GRACE_S, 0.0))

    def load(self, rows: Iterable[EntryRow]) -> None:
        """Take in what was remembered before a restart, oldest use first."""
        for row in sorted(rows, key=lambda row: row.last_used_at):
            entry = Entry(row.key, row.namespace, Tokens(row.packed), row.text, self._clock)
            entry.segments = row.segments
            entry.created_at, entry.last_used_at = row.created_at, row.last_used_at
            entry.hits, entry.keyed, entry.pinned = row.hits, row.keyed, row.pinned
            entry.ttl_s = row.ttl_s
            entry.used_s -= self._age_s(row)
            if row.text_tokens is not None:
                entry.text_tokens = row.text_tokens
            self._add(entry)
            self._learn(entry, replies.decode(row.replies))
            for name in row.names:
                self._add_name(entry, name)
        self._make_room()  # the budget may have become smaller
