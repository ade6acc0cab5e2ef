"""The SQLite index of a cache folder: its blocks, and the entries and names that were promised."""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from rekindle.errors import IndexDamaged, IndexOutdated
from rekindle.kvcache.disk import entry_table
from rekindle.kvcache.disk.entry_table import (
    BlockRow,
    Change,
    DropBlock,
    DropEntry,
    EntryRow,
    EntryTable,
    TouchEntry,
    select,
)
from rekindle.kvcache.disk.files import sync_path

SCHEMA_VERSION = "5"
OLDER_VERSIONS = ("1", "2", "3", "4")
_SCHEMA = f"""
BEGIN IMMEDIATE; {entry_table.SCHEMA}
INSERT INTO meta VALUES ('schema', '{SCHEMA_VERSION}');
COMMIT;
"""
_DANGLING = "FROM names WHERE entry NOT IN (SELECT key FROM entries)"
_CLOSED = "closed"  # key in `meta`: whether the last user has closed the index
SIDECARS = ("-wal", "-shm", "-journal")
BACKUP = ".bak"
MIN_FREE_PAGES = 256  # of 4 KiB: fewer are not worth shrinking the file
# Our statements are correct, so SQLITE_ERROR means that a table or a column is missing.
_DAMAGE = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR}

# One process owns the folder. With an exclusive lock SQLite needs no shared memory, so no mapped
# file can be truncated under the process. `fullfsync` is macOS's real fsync, which also covers the
# block files that were written before. A small log risks little and stays within the budget.
_PRAGMAS = """
PRAGMA locking_mode = EXCLUSIVE; PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;
PRAGMA fullfsync = ON; PRAGMA wal_autocheckpoint = 64; PRAGMA journal_size_limit = 524288;
PRAGMA trusted_schema = OFF; PRAGMA cell_size_check = ON; PRAGMA secure_delete = ON;
"""


class IndexDb:
    """A SQLite file that is created when it is missing. Used by one thread at a time.

    Raises IndexDamaged if the file is not a whole index of ours. An OSError or another
    sqlite3.Error says nothing about the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._copied_changes = -1  # number of changes at the last backup
        self.lacks_backup = False  # a deletion has removed it
        self._is_in_use = False
        self._has_failed = False  # a commit failed, so its changes are missing here
        is_new = _make_private(path)
        self._db = sqlite3.connect(path, timeout=5.0, isolation_level=None, check_same_thread=False)
        self._db.text_factory = bytes.decode  # raises ValueError, as other bad rows do
        self._entries = EntryTable(self._db)
        try:
            with _raising_damage():
                self._begin(is_new)
        except BaseException:
            self._db.close()
            raise

    def _begin(self, is_new: bool) -> None:
        self._db.executescript(_PRAGMAS)
        if is_new:
            self._db.executescript(_SCHEMA)
            return
        if problems := self._problems("quick_check"):
            raise IndexDamaged(problems[0])
        if not select(self._db, "SELECT 1 FROM sqlite_master WHERE name = 'meta'"):
            raise IndexDamaged("it has no tables")
        version = self.meta("schema")
        if version != SCHEMA_VERSION:
            error = IndexOutdated if version in OLDER_VERSIONS else IndexDamaged
            raise error(f"it has schema version {version}, and this server needs {SCHEMA_VERSION}")

    def begin_use(self) -> bool:
        """Allow files to change before their rows. Returns whether rows and files agreed so far,
        because the last user closed the index with every change in it."""
        was_closed = self.meta(_CLOSED) == "yes"
        with suppress(sqlite3.Error):  # without writes, rows and files keep agreeing
            self.set_meta(_CLOSED, "no")
            self._is_in_use = True
        return was_closed

    def close(self) -> None:
        """Move the log into the file and close it."""
        with suppress(sqlite3.Error):  # the next opening reads the log
            if self._is_in_use and not self._has_failed:
                self.set_meta(_CLOSED, "yes")
            self._checkpoint()
        self._db.close()

    def _checkpoint(self) -> None:
        select(self._db, "PRAGMA wal_checkpoint(TRUNCATE)")

    def _shrink(self) -> None:
        """Give free pages back to the disk if they are more than half of the file. Copying the rest
        thus takes no longer than writing what was deleted."""
        [[free]], [[pages]] = (
            select(self._db, f"PRAGMA {count}") for count in ("freelist_count", "page_count")
        )
        if free > max(MIN_FREE_PAGES, pages // 2):
            self._db.execute("VACUUM")

    def meta(self, key: str) -> str | None:
        found = select(self._db, "SELECT value FROM meta WHERE key = ?", (key,))
        return str(found[0][0]) if found else None

    def set_meta(self, key: str, value: str) -> None:
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def blocks(self) -> list[BlockRow]:
        """All blocks in the order in which they were first added."""
        # Parse row by row, because there may be millions.
        with _raising_damage(), closing(self._db.execute(entry_table.SELECT_BLOCKS)) as cursor:
            return list(map(BlockRow.parse, cursor))

    def entries(self) -> list[EntryRow]:
        """All entries with their names."""
        with _raising_damage():
            return self._entries.read()

    def dangling_names(self) -> int:
        """The number of names whose entries are missing."""
        with _raising_damage():
            return int(select(self._db, f"SELECT count(*) {_DANGLING}")[0][0])

    def drop_dangling_names(self) -> None:
        self._db.execute(f"DELETE {_DANGLING}")

    def problems(self) -> list[str]:
        """The findings of SQLite's full integrity check."""
        with _raising_damage():
            return self._problems("integrity_check")

    def _problems(self, check: str) -> list[str]:
        lines = select(self._db, f"PRAGMA {check}(10)")
        found = [" ".join(str(row[0]).split()) for row in lines]
        return [] if found == ["ok"] else found

    def commit(self, changes: Iterable[Change]) -> None:
        """Apply all changes or none. On return they are on disk, and the contents of erased entries
        are in no file."""
        erases = False
        self._db.execute("BEGIN IMMEDIATE")
        try:
            for change in changes:
                self._apply(change)
                erases |= isinstance(change, DropEntry) and change.erased
            self._db.execute("COMMIT")
        except BaseException:
            self._has_failed = True
            self._entries = EntryTable(self._db)  # its counts are wrong after a rollback
            if self._db.in_transaction:  # after some errors SQLite has rolled back already
                with suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
            raise
        if erases:
            self._erase_copies()

    def _erase_copies(self) -> None:
        """Remove what log and backup still have of deleted rows. Rewriting the backup would take
        time that grows with the index, so it is removed, and `backup` soon writes another."""
        with suppress(sqlite3.Error):  # `secure_delete` has overwritten the rows in the file
            self._shrink()
            self._checkpoint()
        backup = beside(self._path, BACKUP)
        if backup.exists():
            backup.unlink()
            sync_path(backup.parent)
            self.lacks_backup = True

    def _apply(self, change: Change) -> None:
        match change:
            case BlockRow():
                self._db.execute(entry_table.PUT_BLOCK, change)
            case DropBlock(block_key):
                self._db.execute("DELETE FROM blocks WHERE key = ?", (block_key,))
            case EntryRow():
                self._entries.put(change)
            case TouchEntry():
                self._entries.touch(change)
            case DropEntry():
                self._entries.drop(change.key)

    def backup(self) -> None:
        """Publish a whole copy next to the index, unless nothing has changed since the last one."""
        changes = self._db.total_changes
        if changes == self._copied_changes and beside(self._path, BACKUP).exists():
            return
        self._checkpoint()  # otherwise a lost log could leave the index older than its backup
        new = beside(self._path, f"{BACKUP}.tmp")
        new.unlink(missing_ok=True)
        try:
            _make_private(new)
            with closing(sqlite3.connect(new, isolation_level=None)) as copy:
                copy.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;")
                self._db.backup(copy)
            publish(new, beside(self._path, BACKUP))
        except BaseException:
            with suppress(OSError):
                new.unlink(missing_ok=True)
            raise
        self._copied_changes = changes
        self.lacks_backup = False


def beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def publish(new: Path, path: Path) -> None:
    """Rename a finished file and flush the rename to disk."""
    sync_path(new)  # before the rename: a crash may lose the new file but never tear the old one
    new.replace(path)
    sync_path(path.parent)


def _make_private(path: Path) -> bool:
    """Create the file with private permissions; SQLite would let others read it and follow links.
    Returns False if it exists."""
    for each in (path, *(beside(path, suffix) for suffix in SIDECARS)):
        with suppress(FileNotFoundError):
            if not stat.S_ISREG(each.lstat().st_mode):
                raise IndexDamaged("it is not a regular file")
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        return False
    os.close(handle)
    return True


@contextmanager
def _raising_damage() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the primary code
        if code not in _DAMAGE:
            raise
        raise IndexDamaged(str(error)) from error
    except (ValueError, TypeError, AttributeError) as error:
        raise IndexDamaged(f"a row cannot be parsed: {error}") from error
