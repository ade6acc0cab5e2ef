"""Writes blocks and index changes on a thread of its own, and reports the outcome as events."""

from __future__ import annotations

import errno
import sqlite3
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from msgspec import Struct
from msgspec.structs import replace

from rekindle.kvcache.disk.entry_table import (
    BlockRow,
    Change,
    DropBlock,
    EntryRow,
    TouchEntry,
)
from rekindle.kvcache.disk.folder import Folder
from rekindle.kvcache.disk.policy_state import PolicyState, write_policy_state
from rekindle.kvcache.tiers.base import Flushed, OnEvent, TierState, Write, WriteFailed, Written

CHANGE_BYTES = 256  # memory of a change, without the contents of an entry
MAX_GIVEN_UP = 10_000  # rows whose loss is remembered for those who wait for them
LULL_S = 0.2  # idle time before writing begins, because the next turn often follows quickly
PATIENCE_S = 0.5  # writing is delayed at most this long while turns are computed


class PendingChanges:
    """The latest change of each row that waits for a commit, within a memory limit.

    Beyond the limit the oldest additions are given up first. A lost addition is computed again, but
    a lost removal would bring deleted state back. Whoever waits for a lost change can ask for it.
    """

    def __init__(self, max_bytes: int = 64 << 20) -> None:
        self.losses = 0  # changes that were given up
        self._given_up: OrderedDict[bytes | str, None] = OrderedDict()
        self.size_bytes = 0
        self._max_bytes = max_bytes
        self._puts: dict[bytes | str, Change] = {}
        self._drops: dict[bytes | str, Change] = {}

    def __len__(self) -> int:
        return len(self._puts) + len(self._drops)

    def add(self, change: Change) -> None:
        """Add a change, replacing an earlier one of the same row."""
        row = change.key
        is_put = isinstance(change, EntryRow | BlockRow | TouchEntry)
        earlier = self._puts.get(row)
        if isinstance(change, TouchEntry) and isinstance(earlier, EntryRow):
            # Keep its position. After a later entry it would take names back from that one.
            self._puts[row] = replace(
                earlier,
                last_used_at=change.last_used_at,
                expires_at=change.expires_at,
                hits=change.hits,
            )
            return
        self._remove(self._puts, row)
        self._remove(self._drops, row)
        (self._puts if is_put else self._drops)[row] = change
        self._given_up.pop(row, None)
        self.size_bytes += _size_bytes(change)
        while self.size_bytes > self._max_bytes:
            self._give_up(self._puts or self._drops)

    def _give_up(self, waiting: dict[bytes | str, Change]) -> None:
        row = next(iter(waiting))
        self._remove(waiting, row)
        self.losses += 1
        self._given_up[row] = None
        if len(self._given_up) > MAX_GIVEN_UP:
            self._given_up.popitem(last=False)

    def has_given_up(self, row: bytes | str) -> bool:
        """Whether the latest change of a row was given up."""
        return row in self._given_up

    def listed(self) -> list[Change]:
        """Additions before removals, so that an entry is there before the one it replaces is
        gone."""
        return [*self._puts.values(), *self._drops.values()]

    def done(self, changes: Sequence[Change]) -> None:
        """Forget committed changes. Later changes of the same rows keep waiting."""
        for change in changes:
            row = change.key
            for waiting in (self._puts, self._drops):
                if waiting.get(row) is change:
                    self._remove(waiting, row)

    def _remove(self, waiting: dict[bytes | str, Change], row: bytes | str) -> None:
        if change := waiting.pop(row, None):
            self.size_bytes -= _size_bytes(change)


def _size_bytes(change: Change) -> int:
    if not isinstance(change, EntryRow):
        return CHANGE_BYTES
    names = (*change.segments, *change.names)
    text_bytes = sum(len(kind) + len(name) for kind, name in names)
    contents = (change.packed, change.text, change.replies, change.document)
    return CHANGE_BYTES + sum(map(len, contents)) + text_bytes


class Remove(Struct, frozen=True):
    key: bytes
    quarantine: bool


class BackUp(Struct, frozen=True):
    """Back up the index, and save what eviction has learned for the next process."""

    state: PolicyState


class Commit(Struct, frozen=True):
    """Commit the index now, without waiting for queued state, and report whether it has the latest
    change of a row."""

    row: str
    then: Callable[[bool], None]


Order = Write | Remove | Flushed | BackUp | Commit


class Writer:
    """One thread that processes orders in batches: unlink, write, then one commit for the batch.
    Orders that arrive before `start` wait."""

    def __init__(self, tier: str, on_event: OnEvent, floor_bytes: int) -> None:
        self._tier = tier
        self._on_event = on_event
        self._floor_bytes = floor_bytes
        self._orders: deque[Order] = deque()
        self._changes = PendingChanges()
        self._is_due = False  # there are changes that no commit has included yet
        self._unremoved: dict[bytes, Remove] = {}  # removals that failed
        self._has_failed = False  # a removal or a change has failed since the last flush
        self._losses = 0  # of changes, up to the last flush
        self._wake = threading.Condition()
        self._closing = False
        self._urgent = 0  # flushes that somebody waits for
        self._idle_since_s: float | None = -LULL_S  # None while turns are being computed

    def start(self, folder: Folder) -> None:
        """Start the thread."""
        self._folder = folder
        self._thread = threading.Thread(target=self._run, name="disk-writer", daemon=True)
        self._thread.start()

    def put(self, order: Order) -> None:
        with self._wake:
            if isinstance(order, Commit):
                self._orders.appendleft(order)  # it waits for changes, not for orders
            else:
                self._orders.append(order)
            self._urgent += isinstance(order, Flushed | Commit)
            self._wake.notify()

    def note(self, change: Change) -> None:
        """Queue a change of the index. It replaces an earlier change of the same row."""
        with self._wake:
            self._changes.add(change)
            self._is_due = True
            self._wake.notify()

    def retry(self) -> None:
        """Retry failed changes and removals."""
        with self._wake:
            self._is_due = bool(self._changes or self._unremoved)
            self._wake.notify()

    def give_way(self, busy: bool) -> None:
        """Write little while turns are computed on the same cores."""
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
        with suppress(OSError, sqlite3.Error):  # the index itself is committed
            self._folder.index_db.backup()

    def _next(self) -> _Batch | None:
        """Wait for the next batch. Returns None when the writer is closed."""
        with self._wake:
            while not (self._orders or self._is_due or self._closing):
                self._wake.wait()
            self._wait_for_idle()
            if not (self._orders or self._is_due):
                return None
            orders: list[Order] = []
            room = 8 << 20  # bytes of a batch
            while self._orders and room > 0:
                order = self._orders.popleft()
                orders.append(order)
                room -= order.size_bytes if isinstance(order, Write) else 0
                if isinstance(order, Flushed | BackUp | Commit):
                    self._urgent -= isinstance(order, Flushed | Commit)
                    break
            self._is_due = False
            return _Batch(orders, self._changes.listed(), self._unremoved)

    def _wait_for_idle(self) -> None:
        """Wait until no turn is computed, but not for long and not while somebody waits."""
        until_s = time.monotonic() + PATIENCE_S
        while not self._urgent and not self._closing:
            now_s, since_s = time.monotonic(), self._idle_since_s
            due_s = until_s if since_s is None else min(since_s + LULL_S, until_s)
            if due_s <= now_s:
                return
            self._wake.wait(due_s - now_s)

    def _work(self, batch: _Batch) -> None:
        """Unlink, write, commit, then report. Nothing is reported as written before it is safe."""
        stuck = _error_of(lambda: self._unlink(batch.unremoved))  # does not block new writes
        unlink_error = _error_of(lambda: self._unlink(batch.removals))
        write_error = unlink_error or _error_of(lambda: self._write(batch.writes))
        commit_error = _error_of(lambda: self._commit(batch, [] if write_error else batch.writes))
        failed = unlink_error or commit_error
        self._has_failed |= failed is not None
        # Failed removals are tried again in the next batch. Failed changes are still pending.
        unremoved = batch.unremoved if stuck or commit_error else {}
        self._unremoved = unremoved | (batch.removals if failed else {})
        error = commit_error or write_error
        if error is not None:
            state, reason = _state_of(error), _reason(error)
            is_there = write_error is None
            self._on_event(WriteFailed(self._tier, batch.asked, state, reason, is_there))
        elif batch.asked:
            self._on_event(Written(self._tier, batch.asked))
        for order in batch.orders:
            if isinstance(order, Flushed):
                losses, self._losses = self._losses, self._changes.losses
                is_safe = not self._has_failed and losses == self._losses
                self._on_event(Flushed(order.then, is_safe=is_safe))
                self._has_failed = False
            elif isinstance(order, Commit):
                is_safe = not (commit_error or self._has_given_up(order.row))
                self._on_event(Flushed(order.then, is_safe=is_safe))
            elif isinstance(order, BackUp):
                self._back_up()
                with suppress(OSError):  # the next process learns again
                    write_policy_state(self._folder.path, order.state)

    def _has_given_up(self, row: str) -> bool:
        with self._wake:
            return self._changes.has_given_up(row)

    def _commit(self, batch: _Batch, writes: list[Write]) -> None:
        drops = [DropBlock(key) for key in (*batch.unremoved, *batch.removals)]
        puts = [
            BlockRow.of(each.key, each.record, each.record.tokens, each.size_bytes)
            for each in writes
        ]
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
            raise OSError(errno.ENOSPC, "the free space of the disk would fall below --disk-floor")
        self._folder.block_files.write([order.record for order in writes])


class _Batch:
    """The last order of each key, pending changes, and removals that failed before."""

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
    except Exception as error:  # the store has to know about every error
        return error
    return None


def _state_of(error: Exception) -> TierState:
    full = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
    code = getattr(error, "sqlite_errorcode", None)
    is_full = isinstance(error, OSError) and error.errno in full
    return "full" if is_full or code == sqlite3.SQLITE_FULL else "failing"


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or repr(error)
