"""Tests that a folder opens after any damage, with an index that agrees with the files."""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.errors import CorruptBlock
from rekindle.kvcache.codec import Record
from rekindle.kvcache.disk.entry_table import BlockRow, DropBlock, TouchEntry
from rekindle.kvcache.disk.folder import Folder, open_folder
from rekindle.kvcache.disk.index_db import IndexDb
from rekindle.kvcache.disk.recovery import Recovery, compare
from tests.kvcache.records import chain, entry, flip, key_of, row_of, size_of

RECORDS = chain(6)
ROWS = [row_of(record) for record in RECORDS]
ENTRY = entry("a", pinned=True, names=(("session_id", "x"),))


class CacheFolder:
    """A closed model folder that can be opened again."""

    def __init__(self, home: Path) -> None:
        self.home = home
        folder = open_folder(home, b"model", limit_bytes=1 << 30)
        self.path, self.index = folder.path, folder.path / "index.db"
        folder.block_files.write(RECORDS)
        folder.index_db.commit(ROWS)
        folder.index_db.commit([ENTRY])
        folder.close()
        self._opened: Folder | None = None

    def open(self) -> Folder:
        self.close()
        self._opened = open_folder(self.home, b"model", limit_bytes=1 << 30)
        return self._opened

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()

    def crash(self) -> None:
        """Leave the folder as a killed process does."""
        self.close()
        self._opened = None
        with closing(sqlite3.connect(self.index, isolation_level=None)) as db:
            db.execute("UPDATE meta SET value = 'no' WHERE key = 'closed'")

    def file(self, record: Record) -> Path:
        return self.path / "blocks" / key_of(record).hex()


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[CacheFolder]:
    made = CacheFolder(tmp_path / "cache")
    yield made
    made.close()


def assert_consistent(cache: CacheFolder, rows: list[BlockRow]) -> None:
    """Index and files agree, and nothing is left to repair."""
    folder = cache.open()
    assert folder.recovery == Recovery()
    assert {row.key: row for row in folder.index_db.blocks()} == {row.key: row for row in rows}
    assert folder.block_files.sizes() == {row.key: row.size_bytes for row in rows}
    for record in RECORDS:
        if key_of(record) in folder.block_files.sizes():
            assert folder.block_files.read(key_of(record), size_of(record)) == record


# -- files ---------------------------------------------------------------------------------------


def test_a_missing_file_makes_its_descendants_unreachable(cache: CacheFolder) -> None:
    cache.file(RECORDS[3]).unlink()
    assert cache.open().recovery == Recovery(lost=3, removed=2)
    assert_consistent(cache, ROWS[:3])


def test_a_file_truncated_by_a_crash_is_quarantined(cache: CacheFolder) -> None:
    cache.crash()
    with cache.file(RECORDS[5]).open("r+b") as file:
        file.truncate(50)
    assert cache.open().recovery == Recovery(lost=1, quarantined=1)
    assert len(list((cache.path / "aside").iterdir())) == 1
    assert_consistent(cache, ROWS[:5])


def test_a_file_truncated_after_a_clean_shutdown_is_detected_when_it_is_read(
    cache: CacheFolder,
) -> None:
    with cache.file(RECORDS[5]).open("r+b") as file:
        file.truncate(50)
    folder = cache.open()
    assert folder.recovery == Recovery()
    with pytest.raises(CorruptBlock, match="50 bytes instead of"):
        folder.block_files.read(key_of(RECORDS[5]), size_of(RECORDS[5]))


def test_sizes_are_compared_after_a_failed_commit(cache: CacheFolder) -> None:
    folder = cache.open()
    with cache.file(RECORDS[5]).open("r+b") as file:
        file.truncate(50)
    with pytest.raises(sqlite3.ProgrammingError):
        folder.index_db.commit([TouchEntry("a", object(), None, 1)])  # type: ignore[arg-type]
    assert cache.open().recovery == Recovery(lost=1, quarantined=1)


def test_a_folder_in_place_of_a_file_is_quarantined(cache: CacheFolder) -> None:
    cache.file(RECORDS[5]).unlink()
    cache.file(RECORDS[5]).mkdir()
    assert cache.open().recovery == Recovery(lost=1, quarantined=1)
    assert_consistent(cache, ROWS[:5])


def test_files_without_rows_are_adopted(cache: CacheFolder) -> None:
    cache.open().index_db.commit([DropBlock(row.key) for row in ROWS[2:]])
    assert cache.open().recovery == Recovery(adopted=4)
    assert_consistent(cache, ROWS)


def test_an_adopted_parent_comes_before_its_children(cache: CacheFolder) -> None:
    cache.open().index_db.commit([DropBlock(ROWS[1].key)])
    folder = cache.open()
    assert folder.recovery == Recovery(adopted=1)
    assert folder.index_db.blocks() == ROWS
    assert_consistent(cache, ROWS)


def test_a_file_without_a_row_and_without_a_parent_is_removed(cache: CacheFolder) -> None:
    stranger = chain(3, seed=8)[2]
    cache.open().block_files.write([stranger])
    assert cache.open().recovery == Recovery(removed=1)
    assert_consistent(cache, ROWS)


def test_a_file_that_was_replaced_before_its_row_is_kept(cache: CacheFolder) -> None:
    larger = replace(RECORDS[2], blob=bytes(500), exact=True)
    cache.open().block_files.write([larger])
    cache.crash()
    folder = cache.open()
    assert folder.recovery == Recovery(adopted=1)
    assert folder.index_db.blocks() == [*ROWS[:2], row_of(larger), *ROWS[3:]]
    assert folder.block_files.read(key_of(larger), size_of(larger)) == larger


def test_a_row_that_contradicts_its_key_is_not_used(cache: CacheFolder) -> None:
    cache.open().index_db.commit([ROWS[1]._replace(packed=b"lies")])
    assert cache.open().recovery == Recovery(adopted=1)
    assert_consistent(cache, ROWS)


def test_unfinished_writes_are_removed_and_foreign_files_stay(cache: CacheFolder) -> None:
    (cache.path / "blocks" / f".{'a' * 64}.tmp").touch()
    (cache.path / "blocks" / "notes.txt").touch()
    assert cache.open().block_files.foreign() == ["notes.txt"]
    assert cache.open().block_files.unfinished() == []
    assert_consistent(cache, ROWS)


# -- the index -----------------------------------------------------------------------------------


def _remove(path: Path) -> None:
    path.unlink()


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2 + 100])


def _garbage(path: Path) -> None:
    path.write_bytes(random.Random(1).randbytes(path.stat().st_size))


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


RUINS = [_remove, _empty, _zero, _cut, _garbage, _folder, _link]


@pytest.mark.parametrize("ruin", RUINS)
def test_a_lost_index_is_rebuilt_from_the_files(
    cache: CacheFolder, ruin: Callable[[Path], None]
) -> None:
    ruin(cache.index)
    folder = cache.open()
    assert folder.recovery == Recovery(adopted=6, rebuilt=True)
    assert folder.index_db.entries() == []
    assert_consistent(cache, ROWS)
    assert (cache.path / "index.db.damaged").is_symlink() == (ruin is _link)


@pytest.mark.parametrize("ruin", RUINS)
def test_entries_come_back_from_the_backup(
    cache: CacheFolder, ruin: Callable[[Path], None]
) -> None:
    folder = cache.open()
    folder.index_db.commit([DropBlock(row.key) for row in ROWS[4:]])
    folder.index_db.backup()
    cache.close()
    ruin(cache.index)
    folder = cache.open()
    assert folder.recovery == Recovery(adopted=2, rebuilt=True, restored_from_backup=True)
    assert folder.index_db.entries() == [ENTRY]
    assert_consistent(cache, ROWS)


@pytest.mark.parametrize("ruin", RUINS)
def test_a_damaged_backup_is_ignored(cache: CacheFolder, ruin: Callable[[Path], None]) -> None:
    cache.open().index_db.backup()
    cache.close()
    ruin(cache.index)
    ruin(cache.path / "index.db.bak")
    if ruin is _link:  # its target is the index that was moved there first
        _zero(cache.path / "elsewhere")
    assert cache.open().recovery == Recovery(adopted=6, rebuilt=True)
    assert_consistent(cache, ROWS)


@pytest.mark.parametrize("ruin", RUINS)
def test_a_damaged_log_loses_no_blocks_and_no_backed_up_entries(
    cache: CacheFolder, ruin: Callable[[Path], None], tmp_path: Path
) -> None:
    folder = cache.open()
    folder.index_db.backup()
    more = chain(3, seed=5)
    folder.block_files.write(more)
    folder.index_db.commit([row_of(record) for record in more])
    shutil.copytree(cache.path, tmp_path / "crashed")  # with the log, as a crash leaves it
    cache.close()
    shutil.rmtree(cache.path)
    shutil.copytree(tmp_path / "crashed", cache.path)
    ruin(cache.path / "index.db-wal")
    assert cache.open().index_db.entries() == [ENTRY]
    assert_consistent(cache, [*ROWS, *map(row_of, more)])


def test_an_old_log_is_never_replayed_into_a_new_index(cache: CacheFolder, tmp_path: Path) -> None:
    folder = cache.open()
    folder.index_db.backup()
    folder.index_db.commit([entry(f"e{n}") for n in range(20)])
    shutil.copyfile(cache.path / "index.db-wal", tmp_path / "log")
    cache.close()
    cache.index.unlink()
    shutil.copyfile(tmp_path / "log", cache.path / "index.db-wal")
    assert cache.open().index_db.entries() == [ENTRY]
    assert cache.open().index_db.problems() == []


def test_any_flipped_byte_of_the_index_leaves_a_folder_that_opens(cache: CacheFolder) -> None:
    whole = cache.index.read_bytes()
    chance = random.Random(2)
    for _ in range(60):
        cache.close()
        cache.index.write_bytes(whole)
        flip(cache.index, chance.randrange(len(whole)), 1 << chance.randrange(8))
        folder = cache.open()
        for row in folder.index_db.blocks():
            record = folder.block_files.read(row.key, row.size_bytes)
            assert (record.parent, record.tokens.packed) == (row.parent, row.packed)


def test_only_the_latest_damaged_index_is_kept(cache: CacheFolder) -> None:
    for content in (b"first", b"second"):
        cache.close()
        cache.index.write_bytes(content)
        cache.open()
    assert (cache.path / "index.db.damaged").read_bytes() == b"second"


def test_a_folder_in_place_of_the_index_is_set_aside(cache: CacheFolder) -> None:
    cache.index.write_bytes(b"first")
    for _ in range(2):
        cache.open()
        cache.close()
        _folder(cache.index)
    assert cache.open().recovery == Recovery(adopted=6, rebuilt=True)
    assert (cache.path / "index.db.damaged").is_dir()


def test_an_entry_that_cannot_be_parsed_restores_the_backup(cache: CacheFolder) -> None:
    cache.open().index_db.backup()
    cache.close()
    with closing(sqlite3.connect(cache.index, isolation_level=None)) as db:
        db.execute("UPDATE entries SET segments = 'no json'")
    assert cache.open().recovery == Recovery(rebuilt=True, restored_from_backup=True)
    assert cache.open().index_db.entries() == [ENTRY]


def test_an_index_of_another_version_is_rebuilt(cache: CacheFolder) -> None:
    with closing(sqlite3.connect(cache.index, isolation_level=None)) as db:
        db.execute("UPDATE meta SET value = '999' WHERE key = 'schema'")
    assert cache.open().recovery == Recovery(adopted=6, rebuilt=True)


def test_a_lack_of_handles_does_not_set_the_index_aside(
    cache: CacheFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(index_db: IndexDb) -> list[BlockRow]:
        raise sqlite3.OperationalError("unable to open database file")

    with monkeypatch.context() as patched:
        patched.setattr(IndexDb, "blocks", fail)
        with pytest.raises(sqlite3.OperationalError):
            cache.open()
    assert not (cache.path / "index.db.damaged").exists()
    assert cache.open().index_db.entries() == [ENTRY]


# -- the comparison ------------------------------------------------------------------------------

FOREST = [row_of(record) for seed in range(3) for record in chain(4, seed=seed)]


some = st.lists(st.sampled_from(FOREST), unique=True)


@given(known=some, files=some)
def test_after_recovery_the_index_has_exactly_the_reachable_files_parents_first(
    known: list[BlockRow], files: list[BlockRow]
) -> None:
    found = {row.key: row for row in files}
    census = compare(known, found)
    rows = {row.key: row for row in known}
    for change in census.changes:
        match change:
            case DropBlock(key):
                del rows[key]
            case BlockRow(key):
                rows[key] = change
    for key in census.unreachable:
        del found[key]
    assert rows == found
    for place, row in enumerate(rows.values()):
        assert row.parent == row.namespace or row.parent in list(rows)[:place]
    assert compare(rows.values(), found) == compare([], {})


def test_a_block_under_a_parent_of_another_namespace_is_unreachable() -> None:
    stray = ROWS[1]._replace(namespace=b"t" * 32)
    census = compare([], {ROWS[0].key: ROWS[0], stray.key: stray})
    assert census.adopted == (ROWS[0],)
    assert census.unreachable == (stray.key,)
