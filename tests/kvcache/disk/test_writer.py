"""Tests the order of the writer's system calls, commits and events."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from queue import SimpleQueue

import pytest
from msgspec.structs import replace

from rekindle.kvcache.block import Block, BlockKind, chain_key
from rekindle.kvcache.disk.folder import open_folder
from rekindle.kvcache.disk.index_db import IndexDb
from rekindle.kvcache.disk.writer import Commit, Remove, Writer
from rekindle.kvcache.tiers.base import Flushed, OnEvent, TierEvent, Written
from rekindle.kvcache.tiers.disk import DiskTier
from rekindle.tokens import Tokens
from tests.kvcache.records import entry
from tests.stress.trouble import Trouble, block_files_with

ROOT = Block(b"r" * 32, None, Tokens(), BlockKind(0, exact=True))
TOKENS = Tokens.of([1, 2])
KEY = chain_key(ROOT.key, TOKENS)
PATIENCE_S = 30.0


class Recorded:
    """A disk tier that logs its system calls, commits and events in order."""

    def __init__(self, home: Path) -> None:
        trouble = Trouble(())
        folder = open_folder(home, b"model", limit_bytes=1 << 30)
        folder.block_files = block_files_with(folder.path, trouble.calls())
        self.log = trouble.log
        self._events: SimpleQueue[TierEvent] = SimpleQueue()
        folder.index_db._db.set_trace_callback(self._on_statement)
        self.tier = DiskTier(folder, self._on_event)

    def _on_statement(self, statement: str) -> None:
        if statement == "COMMIT":
            self.log.append(("commit", ""))

    def _on_event(self, event: TierEvent) -> None:
        self.log.append((type(event).__name__, ""))
        self._events.put(event)

    def flush(self) -> list[str]:
        """The steps since the last call, up to the next event."""
        self.tier.flush(lambda _: None)
        while not isinstance(self._events.get(timeout=PATIENCE_S), Flushed):
            pass
        steps = [_step(kind, what) for kind, what in self.log]
        self.log.clear()
        return steps


def _step(kind: str, what: object) -> str:
    if kind != "fsync":
        return kind
    return "fsync folder" if what in FOLDERS else "fsync file"


FOLDERS: set[object] = set()


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    real = os.open

    def opened(path: object, flags: int, *args: int, **options: int) -> int:
        handle = real(path, flags, *args, **options)  # type: ignore[arg-type]  # as it was called
        FOLDERS.discard(handle)
        if flags & os.O_DIRECTORY:
            FOLDERS.add(handle)
        return handle

    monkeypatch.setattr("os.open", opened)
    made = Recorded(tmp_path / "kv")
    yield made
    made.tier.close()


def test_a_block_is_reported_as_written_after_file_folder_and_index_are_on_disk(
    recorded: Recorded,
) -> None:
    block = Block(KEY, ROOT, TOKENS, BlockKind(4, exact=False))
    recorded.tier.put(block, b"data")
    assert recorded.flush() == [
        *("open", "writev", "fsync file", "replace", "fsync folder"),
        *("commit", Written.__name__, Flushed.__name__),
    ]


def test_a_removal_is_reported_after_file_folder_and_index_are_on_disk(
    recorded: Recorded,
) -> None:
    block = Block(KEY, ROOT, TOKENS, BlockKind(4, exact=False))
    recorded.tier.put(block, b"data")
    recorded.flush()
    recorded.tier.remove(block)
    assert recorded.flush() == ["unlink", "fsync folder", "commit", Flushed.__name__]


def test_changes_are_committed_before_queued_state(tmp_path: Path) -> None:
    """The commit's outcome is not reported to those who wait for the queued state."""
    folder = open_folder(tmp_path / "kv", b"model", limit_bytes=1 << 30)
    told: SimpleQueue[TierEvent] = SimpleQueue()
    writer = Writer("disk", told.put, 0)
    answers: list[str] = []
    writer.put(Remove(KEY, quarantine=False))
    writer.put(Flushed(lambda _: answers.append("all")))
    writer.note(entry("noted"))
    writer.put(Commit("noted", lambda _: answers.append(folder.index_db.entries()[0].key)))
    writer.start(folder)
    for _ in range(2):
        event = told.get(timeout=PATIENCE_S)
        assert isinstance(event, Flushed)
        assert event.is_safe
        event.then(event.is_safe)
    writer.close()
    folder.close()
    assert answers == ["noted", "all"]


def test_a_change_that_was_given_up_is_not_reported_as_safe(tmp_path: Path) -> None:
    """While a commit takes long, more changes may arrive than there is memory for."""
    folder = open_folder(tmp_path / "kv", b"model", limit_bytes=1 << 30)
    told: SimpleQueue[TierEvent] = SimpleQueue()
    writer = Writer("disk", told.put, 0)
    outcomes: dict[str, bool] = {}
    for key in ("a", "b", "c"):  # 90 MB, and the limit is 64 MB
        writer.note(replace(entry(key), document=key.encode() * 30_000_000))
        writer.put(Commit(key, partial(outcomes.__setitem__, key)))
    for name in ("all", "later"):
        writer.put(Flushed(partial(outcomes.__setitem__, name)))
    writer.start(folder)
    while len(outcomes) < 5:
        event = told.get(timeout=PATIENCE_S)
        assert isinstance(event, Flushed)
        event.then(event.is_safe)
    writer.close()
    stored = {row.key for row in folder.index_db.entries()}
    folder.close()
    assert outcomes == {"a": False, "b": True, "c": True, "all": False, "later": True}
    assert stored == {"b", "c"}


class WatchedWriter(Writer):
    """Records what `retry`, which another thread may call at any time, sees of failed removals."""

    def __init__(self, tier: str, on_event: OnEvent, floor_bytes: int) -> None:
        self.seen: list[set[bytes]] = []
        super().__init__(tier, on_event, floor_bytes)

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "_unremoved":
            self.seen.append(set(self._unremoved))


def test_a_retry_always_sees_the_removals_that_failed(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "kv", b"model", limit_bytes=1 << 30)
    trouble = Trouble(("unlink",), errno.EACCES)
    folder.block_files = block_files_with(folder.path, trouble.calls())
    told: SimpleQueue[TierEvent] = SimpleQueue()
    writer = WatchedWriter("disk", told.put, 0)
    writer.put(Remove(KEY, quarantine=False))
    writer.start(folder)
    for error in (errno.EACCES, errno.EACCES, None):
        trouble.error = error
        writer.retry()
        writer.put(Flushed(lambda _: None))
        while not isinstance(told.get(timeout=PATIENCE_S), Flushed):
            pass
    writer.close()
    folder.close()
    assert [seen for seen, _ in groupby(writer.seen[1:])] == [{KEY}, set()]


def test_a_commit_is_on_disk_when_it_returns(tmp_path: Path) -> None:
    """SQLite syncs its log with every commit. On macOS that covers the earlier block files."""
    index_db = IndexDb(tmp_path / "index.db")
    [(mode,)] = index_db._db.execute("PRAGMA journal_mode")
    [(synchronous,)] = index_db._db.execute("PRAGMA synchronous")
    [(full,)] = index_db._db.execute("PRAGMA fullfsync")
    index_db.close()
    assert (mode, synchronous, full) == ("wal", 2, 1)
    assert sqlite3.threadsafety == 3  # the thread that commits is not the one that opened
