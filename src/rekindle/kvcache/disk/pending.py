"""Changes of the index that wait for a commit, within a bound of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rekindle.kvcache.disk.index_db import (
    Change,
    DropBlock,
    DropEntry,
    PutBlock,
    PutEntry,
    TouchEntry,
)

MOST_BYTES = 64 << 20  # kept for a disk that may come back
CHANGE_BYTES = 256  # of a change beside what an entry says


class PendingChanges:
    """Of each row the latest change. Beyond the bound the oldest entries are given up first: state
    is computed again then, while a removal that was forgotten would bring state back."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.size_bytes = 0
        self._most_bytes = most_bytes
        self._puts: dict[object, Change] = {}
        self._drops: dict[object, Change] = {}

    def __len__(self) -> int:
        return len(self._puts) + len(self._drops)

    def add(self, change: Change) -> None:
        """Wait with this change, in place of what it makes superfluous."""
        row = _row_of(change)
        is_put = isinstance(change, PutEntry | PutBlock | TouchEntry)
        earlier = self._puts.get(row)
        if isinstance(change, TouchEntry) and isinstance(earlier, PutEntry):
            # Where it was: behind a later entry, its names would be taken back from that one.
            self._puts[row] = _touched(earlier, change)
            return
        self._remove(self._puts, row)
        self._remove(self._drops, row)
        (self._puts if is_put else self._drops)[row] = change
        self.size_bytes += _size_bytes(change)
        while self.size_bytes > self._most_bytes:
            oldest = self._puts or self._drops
            self._remove(oldest, next(iter(oldest)))

    def listed(self) -> list[Change]:
        """In an order that is right: an entry before the one it takes the place of goes."""
        return [*self._puts.values(), *self._drops.values()]

    def done(self, changes: Sequence[Change]) -> None:
        """These are committed; what came since for the same rows goes on waiting."""
        for change in changes:
            row = _row_of(change)
            for waiting in (self._puts, self._drops):
                if waiting.get(row) is change:
                    self._remove(waiting, row)

    def _remove(self, waiting: dict[object, Change], row: object) -> None:
        if change := waiting.pop(row, None):
            self.size_bytes -= _size_bytes(change)


def _row_of(change: Change) -> object:
    """What two changes of the same row have in common."""
    match change:
        case PutEntry(entry):
            return entry.key
        case TouchEntry(key=key) | DropEntry(key):
            return key
        case PutBlock(block):
            return block.key
        case DropBlock(key):
            return key
    return change


def _touched(put: PutEntry, touch: TouchEntry) -> PutEntry:
    row = replace(
        put.row,
        last_used_at=touch.last_used_at,
        expires_at=touch.expires_at,
        hits=touch.hits,
    )
    return PutEntry(row)


def _size_bytes(change: Change) -> int:
    if not isinstance(change, PutEntry):
        return CHANGE_BYTES
    row = change.row
    names = (*row.segments, *row.names)
    text_bytes = sum(len(kind) + len(name) for kind, name in names)
    contents = (row.packed, row.text, row.replies, row.document)
    return CHANGE_BYTES + sum(map(len, contents)) + text_bytes
