"""The thread that writes to disk behind the turns: orders in, events of what became of them out."""

from __future__ import annotations

import errno
import sqlite3
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

from rekindle.kvcache.disk.folder import Folder
from rekindle.kvcache.disk.index_db import BlockRow, Change, DropBlock, PutBlock
from rekindle.kvcache.tiers.base import Flushed, OnEvent, TierState, Write, WriteFailed, Written

BATCH_BYTES = 8 << 20
LULL_S = 0.2  # of idleness before writing begins: the next turn often comes at once
PATIENCE_S = 0.5  # between two batches when there is no idleness at all
MOST_UNCOMMITTED = 10_000  # changes kept for a disk that may come back


@dataclass(frozen=True, slots=True)
class Remove:
    key: bytes
    quarantine: bool


@dataclass(frozen=True, slots=True)
class BackUp:
    """Make a copy of the index, for the day it is damaged."""


Order = Write | Remove | Change | Flushed | BackUp


class Writer:
    """One thread that takes orders in batches: unlink, write, then one commit for all of it."""

    def __init__(self, folder: Folder, tier: str, on_event: OnEvent, floor_bytes: int) -> None:
        self._folder = folder
        self._tier = tier
        self._on_event = on_event
        self._floor_bytes = floor_bytes
        self._orders: deque[Order] = deque()
        self._uncommitted: list[Change] = []  # changes of the index that wait for a good commit
        self._wake = threading.Condition()
        self._closing = False
        self._urgent = 0  # somebody waits for so many flushes
        self._idle_since_s: float | None = -LULL_S  # None: turns are being computed
        self._thread = threading.Thread(target=self._run, name="disk-writer", daemon=True)
        self._thread.start()

    def put(self, order: Order) -> None:
        with self._wake:
            self._orders.append(order)
            self._urgent += isinstance(order, Flushed)
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

    def _next(self) -> list[Order]:
        """The next orders, up to a batch's bytes; nothing when the end has come."""
        with self._wake:
            while not self._orders and not self._closing:
                self._wake.wait()
            self._wait_for_a_lull()
            batch: list[Order] = []
            room = BATCH_BYTES
            while self._orders and room > 0:
                order = self._orders.popleft()
                batch.append(order)
                room -= order.size_bytes if isinstance(order, Write) else 0
                if isinstance(order, Flushed | BackUp):
                    self._urgent -= isinstance(order, Flushed)
                    break
            return batch

    def _wait_for_a_lull(self) -> None:
        """Not for long, and not when somebody waits for us."""
        until_s = time.monotonic() + PATIENCE_S
        while not self._urgent and not self._closing:
            now_s, since_s = time.monotonic(), self._idle_since_s
            due_s = until_s if since_s is None else min(since_s + LULL_S, until_s)
            if due_s <= now_s:
                return
            self._wake.wait(due_s - now_s)

    def _work(self, batch: list[Order]) -> None:
        """Unlink, write, commit. Failures are reported, and nothing as written before it
        is safe."""
        last = {order.key: order for order in batch if isinstance(order, Write | Remove)}
        writes = [order for order in last.values() if isinstance(order, Write)]
        removals = [order for order in last.values() if isinstance(order, Remove)]
        asked = tuple(order for order in batch if isinstance(order, Write))
        failed = self._try_files(removals, writes)
        self._uncommitted += [DropBlock(order.key) for order in removals]
        self._uncommitted += [o for o in batch if isinstance(o, Change)]
        error = self._try_commit([] if failed else writes) or failed
        if error is not None:
            state, reason = _state_of(error), _sentence(error)
            is_there = failed is None
            self._on_event(WriteFailed(self._tier, asked, state, reason, is_there))
        elif asked:
            self._on_event(Written(self._tier, asked))
        for order in batch:
            if isinstance(order, Flushed):
                self._on_event(order)
            elif isinstance(order, BackUp):
                self._back_up()

    def _try_files(self, removals: list[Remove], writes: list[Write]) -> Exception | None:
        try:
            self._unlink(removals)
            self._write(writes)
        except Exception as error:  # whatever it is, the store has to know
            return error
        return None

    def _try_commit(self, writes: list[Write]) -> Exception | None:
        """Commit these blocks and every change that could not be committed before."""
        try:
            self._folder.index_db.commit(
                [*self._uncommitted, *(PutBlock(_row(order)) for order in writes)]
            )
        except Exception as error:
            del self._uncommitted[:-MOST_UNCOMMITTED]
            return error
        self._uncommitted.clear()
        return None

    def _unlink(self, removals: list[Remove]) -> None:
        for order in removals:
            if order.quarantine:
                self._folder.block_files.quarantine(order.key)
        self._folder.block_files.remove([order.key for order in removals if not order.quarantine])

    def _write(self, writes: list[Write]) -> None:
        if not writes:
            return
        free = self._folder.block_files.free_bytes() - sum(order.size_bytes for order in writes)
        if free < self._floor_bytes:
            raise OSError(errno.ENOSPC, "the disk's free space would fall below its floor")
        self._folder.block_files.write([order.record for order in writes])


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
