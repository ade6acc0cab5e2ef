"""The thread that writes to disk behind the turns: orders in, events of what became of them out."""

from __future__ import annotations

import errno
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from rekindle.kvcache.disk.folder import Folder
from rekindle.kvcache.disk.index_db import (
    BlockRow,
    Change,
    DropBlock,
    DropEntry,
    PutBlock,
    PutEntry,
    TouchEntry,
)
from rekindle.kvcache.disk.policy_state import PolicyState, write_policy_state
from rekindle.kvcache.tiers.base import Flushed, OnEvent, TierState, Write, WriteFailed, Written

# ----------------------------------------------------------------------
# Changes of the index that wait for a commit, within a bound of bytes.

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


BATCH_BYTES = 8 << 20
LULL_S = 0.2  # of idleness before writing begins: the next turn often comes at once
PATIENCE_S = 0.5  # between two batches when there is no idleness at all


@dataclass(frozen=True, slots=True)
class Remove:
    key: bytes
    quarantine: bool


@dataclass(frozen=True, slots=True)
class BackUp:
    """Make a copy of the index, for the day it is damaged."""


@dataclass(frozen=True, slots=True)
class SavePolicyState:
    """Save what eviction has learned, for the next process."""

    state: PolicyState


@dataclass(frozen=True, slots=True)
class Commit:
    """Have the index committed now; state that waits to be written goes on waiting."""

    then: Callable[[bool], None]


Order = Write | Remove | Flushed | BackUp | SavePolicyState | Commit


class Writer:
    """One thread that takes orders in batches: unlink, write, then one commit for all of it. What
    is asked for before it is started waits."""

    def __init__(self, tier: str, on_event: OnEvent, floor_bytes: int) -> None:
        self._tier = tier
        self._on_event = on_event
        self._floor_bytes = floor_bytes
        self._orders: deque[Order] = deque()
        self._changes = PendingChanges()
        self._is_due = False  # there are changes that were not yet tried to be committed
        self._unremoved: dict[bytes, Remove] = {}  # tried in vain
        self._has_failed = False  # a removal or a change, since somebody last asked
        self._wake = threading.Condition()
        self._closing = False
        self._urgent = 0  # somebody waits for so many flushes
        self._idle_since_s: float | None = -LULL_S  # None: turns are being computed

    def start(self, folder: Folder) -> None:
        """Begin with what was asked for until now."""
        self._folder = folder
        self._thread = threading.Thread(target=self._run, name="disk-writer", daemon=True)
        self._thread.start()

    def put(self, order: Order) -> None:
        with self._wake:
            if isinstance(order, Commit):
                self._orders.appendleft(order)  # it is about what was noted, and about no order
            else:
                self._orders.append(order)
            self._urgent += isinstance(order, Flushed | Commit)
            self._wake.notify()

    def note(self, change: Change) -> None:
        """Have the index changed; the latest change of a row is the one that counts."""
        with self._wake:
            self._changes.add(change)
            self._is_due = True
            self._wake.notify()

    def retry(self) -> None:
        """Try again what failed."""
        with self._wake:
            self._is_due = bool(self._changes or self._unremoved)
            self._wake.notify()

    def give_way(self, busy: bool) -> None:
        """While turns are computed on the same cores, write little; begin a lull after them."""
        if busy == (self._idle_since_s is None):
            return
        with self._wake:
            self._idle_since_s = None if busy else time.monotonic()
            self._wake.notify()

    def close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        while batch := self._next():
            self._work(batch)
        self._back_up()

    def _back_up(self) -> None:
        with suppress(OSError, sqlite3.Error):  # the index is committed; a later copy will do
            self._folder.index_db.backup()

    def _next(self) -> _Batch | None:
        """What to do next, up to a batch's bytes; None when the end has come."""
        with self._wake:
            while not (self._orders or self._is_due or self._closing):
                self._wake.wait()
            self._wait_for_a_lull()
            if not (self._orders or self._is_due):
                return None
            orders: list[Order] = []
            room = BATCH_BYTES
            while self._orders and room > 0:
                order = self._orders.popleft()
                orders.append(order)
                room -= order.size_bytes if isinstance(order, Write) else 0
                if isinstance(order, Flushed | BackUp | Commit):
                    self._urgent -= isinstance(order, Flushed | Commit)
                    break
            self._is_due = False
            return _Batch(orders, self._changes.listed(), self._unremoved)

    def _wait_for_a_lull(self) -> None:
        """Not for long, and not when somebody waits for us."""
        until_s = time.monotonic() + PATIENCE_S
        while not self._urgent and not self._closing:
            now_s, since_s = time.monotonic(), self._idle_since_s
            due_s = until_s if since_s is None else min(since_s + LULL_S, until_s)
            if due_s <= now_s:
                return
            self._wake.wait(due_s - now_s)

    def _work(self, batch: _Batch) -> None:
        """Unlink, write, commit. Failures are reported, and nothing as written before it
        is safe."""
        stuck = _error_of(lambda: self._unlink(batch.unremoved))  # it keeps nobody from writing
        unlink_error = _error_of(lambda: self._unlink(batch.removals))
        write_error = unlink_error or _error_of(lambda: self._write(batch.writes))
        commit_error = _error_of(lambda: self._commit(batch, [] if write_error else batch.writes))
        self._keep_what_failed(batch, stuck or commit_error, unlink_error or commit_error)
        error = commit_error or write_error
        if error is not None:
            state, reason = _state_of(error), _sentence(error)
            is_there = write_error is None
            self._on_event(WriteFailed(self._tier, batch.asked, state, reason, is_there))
        elif batch.asked:
            self._on_event(Written(self._tier, batch.asked))
        for order in batch.orders:
            if isinstance(order, Flushed):
                self._on_event(Flushed(order.then, is_safe=not self._has_failed))
                self._has_failed = False  # the next one to ask asks about what comes now
            elif isinstance(order, Commit):
                self._on_event(Flushed(order.then, is_safe=commit_error is None))
            elif isinstance(order, BackUp):
                self._back_up()
            elif isinstance(order, SavePolicyState):
                with suppress(OSError):  # the next process learns again
                    write_policy_state(self._folder.path, order.state)

    def _keep_what_failed(
        self, batch: _Batch, stuck: Exception | None, failed: Exception | None
    ) -> None:
        """For the next batch; a change that was not committed is still among those that wait."""
        self._has_failed |= failed is not None
        self._unremoved = {
            **(batch.unremoved if stuck else {}),
            **(batch.removals if failed else {}),
        }

    def _commit(self, batch: _Batch, writes: list[Write]) -> None:
        drops = [DropBlock(key) for key in (*batch.unremoved, *batch.removals)]
        puts = [PutBlock(_row(order)) for order in writes]
        self._folder.index_db.commit([*batch.changes, *drops, *puts])
        with self._wake:
            self._changes.done(batch.changes)

    def _unlink(self, removals: dict[bytes, Remove]) -> None:
        for order in removals.values():
            if order.quarantine:
                self._folder.block_files.quarantine(order.key)
        self._folder.block_files.remove(
            [order.key for order in removals.values() if not order.quarantine]
        )

    def _write(self, writes: list[Write]) -> None:
        if not writes:
            return
        free = self._folder.block_files.free_bytes() - sum(order.size_bytes for order in writes)
        if free < self._floor_bytes:
            raise OSError(errno.ENOSPC, "the disk's free space would fall below its floor")
        self._folder.block_files.write([order.record for order in writes])


class _Batch:
    """What is carried out together: of each key the last order, and removals that failed before."""

    __slots__ = ("asked", "changes", "orders", "removals", "unremoved", "writes")

    def __init__(
        self, orders: list[Order], changes: list[Change], unremoved: dict[bytes, Remove]
    ) -> None:
        self.orders = orders
        self.changes = changes
        self.asked = tuple(order for order in orders if isinstance(order, Write))
        last = {order.key: order for order in orders if isinstance(order, Write | Remove)}
        self.unremoved = {key: order for key, order in unremoved.items() if key not in last}
        self.writes = [order for order in last.values() if isinstance(order, Write)]
        self.removals = {key: order for key, order in last.items() if isinstance(order, Remove)}


def _error_of(work: Callable[[], None]) -> Exception | None:
    try:
        work()
    except Exception as error:  # whatever it is, the store has to know
        return error
    return None


def _row(order: Write) -> BlockRow:
    record = order.record
    return BlockRow(
        key=order.key,
        parent=record.parent,
        namespace=record.namespace,
        packed=record.tokens.packed,
        size_bytes=order.size_bytes,
        exact=record.exact,
        resumable=record.resumable,
    )


def _state_of(error: Exception) -> TierState:
    full = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
    code = getattr(error, "sqlite_errorcode", None)
    is_full = isinstance(error, OSError) and error.errno in full
    return "full" if is_full or code == sqlite3.SQLITE_FULL else "failing"


def _sentence(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or repr(error)
