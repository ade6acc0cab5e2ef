"""Finds entries by key, name, tokens, text or reply, and keeps them in LRU order."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import count, islice
from typing import Generic, TypeVar

from rekindle.kvcache.entries.entry import Clock, Entry, Name, Reply, newest_replies
from rekindle.kvcache.entries.retention import Retention
from rekindle.tokens import Tokens, common_bytes

T = TypeVar("T")


class _Node(Generic[T]):
    """A stored text, or a common prefix of two stored texts."""

    __slots__ = ("children", "edge", "value")

    def __init__(self, edge: bytes, value: T | None = None) -> None:
        self.edge = edge  # appended to the text of the parent
        self.value = value
        self.children: dict[int, _Node[T]] = {}  # by the first byte of their edges

    def adopt(self, child: _Node[T]) -> None:
        self.children[child.edge[0]] = child

    def next(self, text: bytes, at: int) -> _Node[T] | None:
        """The child whose edge begins with the byte at this position."""
        return self.children.get(text[at]) if at < len(text) else None


class TextIndex(Generic[T]):
    """A radix tree that finds the longest stored prefix of a text.

    A search reads each byte of its text once. A sorted list was rejected: with texts that branch
    off one after the other, it reads the whole text again for each of them. For equal texts the
    later value wins.
    """

    def __init__(self) -> None:
        self._root: _Node[T] = _Node(b"")
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def put(self, text: bytes, value: T) -> None:
        path, at = self._walk(text)
        node = path[-1]
        if child := node.next(text, at):
            node = _split(node, child, common_bytes(child.edge, text[at : at + len(child.edge)]))
            at += len(node.edge)
        if at < len(text):
            node.adopt(_Node(text[at:], value))
            self._count += 1
        else:
            self._count += node.value is None
            node.value = value

    def drop(self, text: bytes, value: T) -> None:
        """Remove the text, unless it has another value by now."""
        path, at = self._walk(text)
        node = path[-1]
        if at < len(text) or node.value is not value:
            return
        node.value = None
        self._count -= 1
        if not node.children and len(path) > 1:
            path.pop()
            del path[-1].children[node.edge[0]]
        _merge(path)

    def longest(self, text: bytes) -> T | None:
        """The value of the longest stored text that is a prefix of `text`."""
        path, _ = self._walk(text)
        return next((node.value for node in reversed(path) if node.value is not None), None)

    def nearest(self, text: bytes) -> T | None:
        """The value of a stored text that has the longest common prefix with `text`."""
        path, at = self._walk(text)
        node = path[-1].next(text, at) or path[-1]
        while node.value is None and node.children:
            node = next(iter(node.children.values()))
        return node.value

    def _walk(self, text: bytes) -> tuple[list[_Node[T]], int]:
        """The nodes whose texts are prefixes of `text`, from the root on, and the end of the
        last."""
        node, at = self._root, 0
        path = [node]
        while (child := node.next(text, at)) and _has_edge(text, at, child.edge):
            node, at = child, at + len(child.edge)
            path.append(node)
        return path, at


def _has_edge(text: bytes, at: int, edge: bytes) -> bool:
    return text.startswith(edge, at)


def _split(node: _Node[T], child: _Node[T], shared: int) -> _Node[T]:
    """Insert a node between these two, after `shared` bytes of the child's edge."""
    between: _Node[T] = _Node(child.edge[:shared])
    node.adopt(between)
    child.edge = child.edge[shared:]
    between.adopt(child)
    return between


def _merge(path: list[_Node[T]]) -> None:
    """Remove the last node if it is neither a text nor a branch."""
    node = path[-1]
    if len(path) == 1 or node.value is not None or len(node.children) != 1:
        return
    [child] = node.children.values()
    child.edge = node.edge + child.edge
    path[-2].adopt(child)


MAX_NAMES = 32  # per entry; the oldest is dropped
MAX_FOUND = 8  # conversations that are considered for one key of a reply
MIN_STALE = 64  # outdated positions that are worth removing


class LruOrder:
    """Entries in LRU order. A use moves an entry to a new position at the end. Outdated positions
    are removed in bulk. They do not keep removed entries, which may have large documents.

    Positions only grow, so a page can continue below the last position of the page before, whatever
    has changed in the meantime.
    """

    def __init__(self) -> None:
        self._places: list[int] = []  # ascending
        self._entries: dict[int, Entry] = {}  # by position, ascending

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        """Least recently used first."""
        return iter(self._entries.values())

    def append(self, entry: Entry) -> None:
        """Add an entry that has a new position at the end."""
        self._places.append(entry.place)
        self._entries[entry.place] = entry

    def leave(self, place: int) -> None:
        """Remove the entry at a position."""
        del self._entries[place]
        if len(self._places) > MIN_STALE + 2 * len(self._entries):
            self._places = list(self._entries)

    def newest(self, before: int | None = None) -> Iterator[Entry]:
        """Most recently used first, below a position. The order must not change meanwhile."""
        at = len(self._places)
        if before is not None:
            at = bisect_left(self._places, before)
        for index in range(at - 1, -1, -1):
            if entry := self._entries.get(self._places[index]):
                yield entry


class ReplyIndex(Generic[T]):
    """Finds the owners of a reply by each of its keys."""

    def __init__(self) -> None:
        self._known: dict[str, dict[T, Reply]] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._known)

    def put(self, owner: T, replies: Iterable[Reply]) -> None:
        for reply in replies:
            for key in reply.keys:
                known = self._known.setdefault(key, {})
                known.pop(owner, None)  # it becomes the newest
                known[owner] = reply

    def drop(self, owner: T, replies: Iterable[Reply]) -> None:
        for key in {key for reply in replies for key in reply.keys}:
            known = self._known.get(key, {})
            known.pop(owner, None)
            if not known:
                self._known.pop(key, None)

    def find(self, key: str) -> list[tuple[T, Reply]]:
        """Newest first."""
        known = self._known.get(key, {})
        return [(owner, known[owner]) for owner in islice(reversed(known), MAX_FOUND)]


class EntryIndex:
    """All entries, expired or not, and their memory. It decides nothing about lifetimes.

    Changed by the engine's thread. Any thread may call `recall`, `replies` and `knows_replies`.
    """

    def __init__(self, retention: Retention) -> None:
        self._retention = retention  # is notified of each change
        #: Number of entries that have an image, by tenant and digest.
        self.pictures: Counter[tuple[bytes, bytes]] = Counter()
        self._numbers: dict[tuple[bytes, str], int] = {}  # the highest, by tenant and kind of name
        self._by_key: dict[str, Entry] = {}
        self._orders: defaultdict[bytes | None, LruOrder] = defaultdict(
            LruOrder
        )  # None for all tenants
        self._places = count(1)
        self._by_name: dict[tuple[bytes, Name], Entry] = {}
        self._by_tokens: dict[tuple[bytes, Tokens], Entry] = {}
        self._texts: dict[bytes, TextIndex[Entry]] = {}
        self._replies: dict[bytes, ReplyIndex[Entry]] = {}
        self._lock = threading.Lock()  # for texts and replies

    def __len__(self) -> int:
        return len(self._by_key)

    def of(self, namespace: bytes | None) -> list[Entry]:
        """The entries of a tenant, or of all tenants, least recently used first."""
        order = self._orders.get(namespace)
        return list(order) if order else []

    def newest(self, namespace: bytes | None, before: int | None) -> Iterator[Entry]:
        """The entries of a tenant, or of all tenants, below a position in the LRU order, most
        recently used first. Nothing may change while it is read."""
        order = self._orders.get(namespace)
        return order.newest(before) if order else iter(())

    def by_key(self, namespace: bytes | None, key: str) -> Entry | None:
        entry = self._by_key.get(key)
        return entry if entry is not None and namespace in (None, entry.tenant) else None

    def by_name(self, namespace: bytes, name: Name) -> Entry | None:
        return self._by_name.get((namespace, name))

    def by_tokens(self, namespace: bytes, tokens: Tokens) -> Entry | None:
        """The entry with these tokens whose state is in this namespace."""
        return self._by_tokens.get((namespace, tokens))

    def before_move(self, entry: Entry) -> None:
        """An entry is about to get state in another namespace. Call `after_move` then."""
        self._forget_tokens(entry)

    def after_move(self, entry: Entry) -> None:
        self._by_tokens[entry.namespace, entry.tokens] = entry
        self._retention.update(entry)

    def _forget_tokens(self, entry: Entry) -> None:
        if self._by_tokens.get((entry.namespace, entry.tokens)) is entry:
            del self._by_tokens[entry.namespace, entry.tokens]

    def recall(self, namespace: bytes, text: bytes) -> Entry | None:
        """The longest conversation whose rendered text is a prefix of `text`. Any thread."""
        with self._lock:
            texts = self._texts.get(namespace)
            return texts.longest(text) if texts else None

    def nearest(self, namespace: bytes, text: bytes) -> Entry | None:
        """A conversation whose rendered text has the longest common prefix with `text`."""
        with self._lock:
            texts = self._texts.get(namespace)
            return texts.nearest(text) if texts else None

    def replies(self, namespace: bytes, key: str) -> list[tuple[Entry, Reply]]:
        """The conversations that have a reply with this key, newest first. Any thread."""
        with self._lock:
            known = self._replies.get(namespace)
            return known.find(key) if known else []

    def knows_replies(self, namespace: bytes) -> bool:
        """Whether a tenant has any replies. Any thread."""
        return namespace in self._replies

    def add(self, entry: Entry) -> None:
        """Add an entry that has no replies and no names yet."""
        self._by_key[entry.key] = entry
        self._set_place(entry, next(self._places))
        if entry.tokens:
            self._by_tokens[entry.namespace, entry.tokens] = entry
        self._retention.update(entry)
        self.pictures.update((entry.tenant, digest) for digest in entry.pictures)
        if entry.text:
            with self._lock:
                self._texts.setdefault(entry.tenant, TextIndex()).put(entry.text, entry)

    def remove(self, entry: Entry) -> None:
        del self._by_key[entry.key]
        self._set_place(entry, 0)
        self._forget_tokens(entry)
        for name in entry.names:
            del self._by_name[entry.tenant, name]
        self._retention.update(entry)
        for picture in ((entry.tenant, digest) for digest in entry.pictures):
            self.pictures[picture] -= 1
            if not self.pictures[picture]:
                del self.pictures[picture]
        with self._lock:
            if texts := self._texts.get(entry.tenant):
                texts.drop(entry.text, entry)
                if not len(texts):
                    del self._texts[entry.tenant]
            if known := self._replies.get(entry.tenant):
                known.drop(entry, entry.replies)
                if not len(known):
                    del self._replies[entry.tenant]

    def use(self, entry: Entry, clock: Clock) -> None:
        """Restart its lifetime and make it the most recently used."""
        entry.use(clock)
        self._set_place(entry, next(self._places))
        self._retention.update(entry)

    def _set_place(self, entry: Entry, place: int) -> None:
        """Move an entry in the LRU order; 0 removes it."""
        before, views = entry.place, (entry.tenant, None)
        if before:
            for view in views:
                self._orders[view].leave(before)
        entry.place = place
        for view in views:
            if place:
                self._orders[view].append(entry)
            elif not self._orders[view]:
                del self._orders[view]

    def set_name(self, entry: Entry, name: Name) -> Entry | None:
        """Give a name to this entry. Returns the entry that had it before."""
        before = self._by_name.get((entry.tenant, name))
        if before is not None and before is not entry:
            del before.names[name]
            self._retention.update(before)
        entry.names.pop(name, None)  # it becomes the newest
        entry.names[name] = None
        self._by_name[entry.tenant, name] = entry
        while len(entry.names) > MAX_NAMES:
            oldest = next(iter(entry.names))
            del entry.names[oldest], self._by_name[entry.tenant, oldest]
        self._retention.update(entry)
        self._count_number(entry.tenant, *name)
        return before if before is not entry else None

    def _count_number(self, namespace: bytes, kind: str, name: str) -> None:
        number = name.removeprefix(f"{kind}_")
        if number != name and number.isascii() and number.isdecimal():
            known = self._numbers.get((namespace, kind), -1)
            self._numbers[namespace, kind] = max(known, int(number))

    def highest_number(self, namespace: bytes, kind: str) -> int:
        """The highest N of all names `kind_N` that a tenant has had, or -1."""
        return self._numbers.get((namespace, kind), -1)

    def set_document(self, entry: Entry, document: bytes) -> None:
        entry.document = document
        self._retention.update(entry)

    def add_replies(self, entry: Entry, new: tuple[Reply, ...]) -> None:
        """Add replies. A conversation may have been delivered several times with different ids."""
        known = newest_replies((*entry.replies, *new))
        if known == entry.replies:
            return
        with self._lock:
            index = self._replies.setdefault(entry.tenant, ReplyIndex())
            index.drop(entry, entry.replies)
            index.put(entry, known)
        entry.replies = known
        entry.reply_bytes = sum(reply.cost_bytes for reply in known)
        self._retention.update(entry)
