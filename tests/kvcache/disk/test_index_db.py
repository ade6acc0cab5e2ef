from __future__ import annotations

import random
import shutil
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rekindle.errors import IndexDamaged
from rekindle.kvcache.disk.entry_table import (
    Change,
    DropBlock,
    DropEntry,
    EntryRow,
    EntryTable,
    TouchEntry,
)
from rekindle.kvcache.disk.index_db import IndexDb
from rekindle.tokens import pack
from tests.kvcache.records import chain, entry, flip, row_of

ROWS = [row_of(record) for record in chain(20)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "index.db"


@pytest.fixture
def index_db(path: Path) -> Iterator[IndexDb]:
    made = IndexDb(path)
    yield made
    made.close()


def filled(path: Path) -> None:
    index_db = IndexDb(path)
    index_db.commit(ROWS)
    index_db.commit([entry(f"e{n}", names=(("session_id", str(n)),)) for n in range(50)])
    index_db.close()


# -- what is kept --------------------------------------------------------------------------------


def test_the_index_survives_a_restart(path: Path) -> None:
    filled(path)
    with closing(IndexDb(path)) as index_db:
        index_db.set_meta("colour", "blue")
    with closing(IndexDb(path)) as index_db:
        assert index_db.blocks() == ROWS
        assert [each.key for each in index_db.entries()] == [f"e{n}" for n in range(50)]
        assert index_db.meta("colour") == "blue"
        assert index_db.meta("shape") is None
        assert index_db.problems() == []


text = st.text(st.characters(codec=None))  # lone surrogates and control characters too
names = st.lists(st.tuples(st.sampled_from(["session_id", "message_id"]), text), unique=True)
time = st.floats(allow_nan=False)
entries = st.builds(
    EntryRow,
    key=st.text("0123456789abcdef", min_size=1),
    namespace=st.binary(min_size=32, max_size=32),
    packed=st.binary(),
    text=st.binary(),
    segments=st.lists(st.tuples(text, text)).map(tuple),
    created_at=time,
    last_used_at=time,
    ttl_s=st.none() | time,
    expires_at=st.none() | time,
    pinned=st.booleans(),
    hits=st.integers(0, 2**62),
    keyed=st.booleans(),
    names=names.map(tuple),
    text_tokens=st.none() | st.integers(0, 2**62),
    replies=st.binary(),
    document=st.binary(),
)


@given(row=entries)
def test_an_entry_is_read_back_unchanged(row: EntryRow) -> None:
    index_db = IndexDb.__new__(IndexDb)
    index_db._db = sqlite3.connect(":memory:", isolation_level=None)
    index_db._db.text_factory = bytes.decode
    index_db._entries = EntryTable(index_db._db)
    with closing(index_db._db):
        index_db._begin(is_new=True)
        index_db.commit([row])
        assert index_db.entries() == [row]


def test_a_replaced_block_keeps_its_place(index_db: IndexDb) -> None:
    index_db.commit(ROWS)
    larger = ROWS[0]._replace(size_bytes=999, kind=1)
    index_db.commit([larger, DropBlock(ROWS[5].key)])
    assert index_db.blocks() == [larger, *ROWS[1:5], *ROWS[6:]]


def test_putting_an_entry_replaces_all_its_names(index_db: IndexDb) -> None:
    index_db.commit([entry("a", names=(("session_id", "x"), ("message_id", "y")))])
    index_db.commit([entry("a", names=(("session_id", "z"),))])
    assert [each.names for each in index_db.entries()] == [(("session_id", "z"),)]


def test_a_name_moves_from_one_entry_to_another(index_db: IndexDb) -> None:
    index_db.commit([entry("a", names=(("session_id", "x"), ("session_id", "y")))])
    index_db.commit([entry("b", names=(("session_id", "x"),))])
    assert {each.key: each.names for each in index_db.entries()} == {
        "a": (("session_id", "y"),),
        "b": (("session_id", "x"),),
    }


def test_the_same_name_of_two_tenants_is_two_names(index_db: IndexDb) -> None:
    mine = entry("a", names=(("session_id", "x"),))
    theirs = replace(entry("b", names=(("session_id", "x"),)), namespace=b"t" * 32)
    index_db.commit([mine, theirs])
    assert index_db.entries() == [mine, theirs]


def test_a_use_changes_only_the_columns_of_a_use(index_db: IndexDb) -> None:
    before = entry("a", names=(("session_id", "x"),))
    index_db.commit([before, TouchEntry("a", 10.0, 20.0, 7), TouchEntry("gone", 1, 2, 3)])
    assert index_db.entries() == [replace(before, last_used_at=10.0, expires_at=20.0, hits=7)]


def test_dropping_an_entry_drops_its_names(index_db: IndexDb) -> None:
    index_db.commit([entry("a", names=(("session_id", "x"),)), DropEntry("a")])
    assert index_db.entries() == []
    assert index_db.dangling_names() == 0


def test_a_name_without_an_entry_is_found_and_can_be_dropped(path: Path) -> None:
    filled(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("DELETE FROM entries WHERE key = 'e7'")
    with closing(IndexDb(path)) as index_db:
        assert index_db.dangling_names() == 1
        index_db.drop_dangling_names()
        assert index_db.dangling_names() == 0


# -- what is written -----------------------------------------------------------------------------


def long_row(tokens: int) -> EntryRow:
    """A conversation that a longer one continues."""
    return replace(
        entry(f"of {tokens} tokens", names=(("session_id", "mine"),)),
        packed=pack(range(tokens)),
        text=b"".join(b"%d " % number for number in range(tokens)),
        segments=tuple(("turn", f"{number:064x}") for number in range(tokens // 100)),
        replies=b"".join(b"%060d" % number for number in range(tokens // 100)),
    )


def written_bytes(path: Path, index_db: IndexDb, changes: list[Change]) -> int:
    """The bytes that a commit adds to the log."""
    index_db._checkpoint()
    index_db.commit(changes)
    return path.with_name("index.db-wal").stat().st_size


def test_only_the_new_part_of_a_conversation_is_written(path: Path, index_db: IndexDb) -> None:
    """A turn at 100,000 tokens used to write 1.6 MB, and the same again for each use."""
    most = []
    for tokens in (1_000, 100_000):
        before, after = long_row(tokens), long_row(tokens + 200)
        index_db.commit([before])
        turn = written_bytes(path, index_db, [after, DropEntry(before.key)])
        touch = written_bytes(path, index_db, [TouchEntry(after.key, 10.0, None, 1)])
        pinned = replace(after, pinned=True)
        pin = written_bytes(path, index_db, [pinned])
        most.append(max(turn, touch, pin))
        [found] = index_db.entries()
        assert found == pinned
        index_db.commit([DropEntry(after.key)])
    assert most[1] < 2 * most[0] < 300_000


def test_shared_pieces_are_stored_once_and_until_the_last_entry_is_dropped(
    path: Path, index_db: IndexDb
) -> None:
    alone = replace(long_row(20_000), key="alone")
    branches = [
        replace(alone, key=f"{n}", packed=alone.packed + pack([n]), names=()) for n in range(20)
    ]
    index_db.commit([alone])
    index_db._checkpoint()
    alone_bytes = path.stat().st_size
    index_db.commit(branches)
    index_db._checkpoint()
    assert path.stat().st_size < 2 * alone_bytes
    index_db.commit([DropEntry(alone.key), *(DropEntry(each.key) for each in branches[:-1])])
    assert index_db.entries() == branches[-1:]
    index_db.commit([DropEntry(branches[-1].key)])
    assert index_db._db.execute("SELECT count(*) FROM pieces").fetchone() == (0,)


# -- all or nothing ------------------------------------------------------------------------------


def test_a_commit_that_fails_halfway_changes_nothing(index_db: IndexDb) -> None:
    index_db.commit([ROWS[0]])
    impossible = ROWS[2]._replace(size_bytes=None)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(sqlite3.IntegrityError):
        index_db.commit([ROWS[1], DropBlock(ROWS[0].key), impossible])
    assert index_db.blocks() == [ROWS[0]]
    index_db.commit([ROWS[1]])
    assert index_db.blocks() == ROWS[:2]


def test_a_commit_with_an_invalid_change_is_rolled_back(index_db: IndexDb) -> None:
    def changes() -> Iterator[Change]:
        yield ROWS[0]
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError):
        index_db.commit(changes())
    index_db.commit([])
    assert index_db.blocks() == []


def test_a_full_disk_is_not_reported_as_damage(index_db: IndexDb) -> None:
    index_db.commit([ROWS[0]])
    pages = index_db._db.execute("PRAGMA page_count").fetchone()[0]
    index_db._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(sqlite3.Error) as raised:
        index_db.commit([replace(entry("a"), text=b"x" * 100_000)])
    assert raised.value.sqlite_errorcode == sqlite3.SQLITE_FULL
    index_db._db.execute("PRAGMA max_page_count = 1000000")
    index_db.commit([ROWS[1]])
    assert index_db.blocks() == ROWS[:2]
    assert index_db.entries() == []


def test_another_thread_may_commit(index_db: IndexDb) -> None:
    thread = threading.Thread(target=index_db.commit, args=([ROWS[0]],))
    thread.start()
    thread.join()
    assert index_db.blocks() == ROWS[:1]


COMMIT_AND_DIE = """
import os, sys
from pathlib import Path
from rekindle.kvcache.disk.index_db import IndexDb
from rekindle.tokens import pack
from tests.kvcache.records import chain, row_of
index_db = IndexDb(Path(sys.argv[1]))
for record in chain(20):
    index_db.commit([row_of(record)])
os._exit(9)
"""


def test_a_commit_survives_a_kill(path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", COMMIT_AND_DIE, path], check=False)
    assert ended.returncode == 9
    assert path.with_name("index.db-wal").stat().st_size > 0
    with closing(IndexDb(path)) as index_db:
        assert index_db.blocks() == ROWS


# -- the files -----------------------------------------------------------------------------------


def test_only_the_owner_can_read_it(path: Path) -> None:
    with closing(IndexDb(path)) as index_db:
        index_db.commit([ROWS[0]])
        index_db.backup()
        modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in path.parent.iterdir()}
    assert modes == {"index.db": 0o600, "index.db-wal": 0o600, "index.db.bak": 0o600}


def test_the_log_stays_small_and_is_gone_after_closing(path: Path) -> None:
    log = path.with_name("index.db-wal")
    with closing(IndexDb(path)) as index_db:
        for n in range(300):
            index_db.commit([replace(entry(f"e{n}"), text=b"x" * 5000)])
        assert log.stat().st_size < 1 << 20
    assert not log.exists() or log.stat().st_size == 0


def test_a_backup_is_an_index_of_its_own(path: Path) -> None:
    with closing(IndexDb(path)) as index_db:
        index_db.commit(ROWS[:3])
        index_db.backup()
        index_db.commit(ROWS[3:])
        kept = sorted(each.name for each in path.parent.iterdir())
        assert kept == ["index.db", "index.db-wal", "index.db.bak"]
    copy = path.with_name("copy.db")
    shutil.copyfile(path.with_name("index.db.bak"), copy)
    with closing(IndexDb(copy)) as index_db:
        assert index_db.blocks() == ROWS[:3]


def test_an_index_without_its_log_is_no_older_than_its_backup(path: Path) -> None:
    with closing(IndexDb(path)) as index_db:
        index_db.commit(ROWS[:3])
        index_db.backup()
        index_db.commit([ROWS[3]])
        copy = path.with_name("copy.db")
        shutil.copyfile(path, copy)  # as a crash that takes the log would leave it
    with closing(IndexDb(copy)) as index_db:
        assert index_db.blocks()[:3] == ROWS[:3]


def test_an_index_that_did_not_change_is_not_copied_again(path: Path, index_db: IndexDb) -> None:
    def copied() -> tuple[int, int]:
        index_db.backup()
        status = path.with_name("index.db.bak").stat()
        return status.st_ino, status.st_mtime_ns

    index_db.commit([ROWS[0]])
    first = copied()
    index_db.commit([])
    assert copied() == first
    index_db.commit([DropBlock(ROWS[0].key)])
    assert copied() != first
    path.with_name("index.db.bak").unlink()
    copied()  # one that somebody removed is made again


def test_a_backup_that_fails_leaves_the_last_one(
    path: Path, index_db: IndexDb, monkeypatch: pytest.MonkeyPatch
) -> None:
    index_db.commit([ROWS[0]])
    index_db.backup()
    before = path.with_name("index.db.bak").read_bytes()
    index_db.commit([ROWS[1]])

    def fail(handle: int) -> None:
        raise OSError("on purpose")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="on purpose"):
        index_db.backup()
    assert path.with_name("index.db.bak").read_bytes() == before
    assert not path.with_name("index.db.bak.tmp").exists()


def kept_files(folder: Path, content: bytes) -> list[str]:
    """The files that contain these bytes."""
    return sorted(each.name for each in folder.iterdir() if content in each.read_bytes())


def test_an_erased_entry_is_in_no_file(path: Path, index_db: IndexDb) -> None:
    index_db.commit([replace(entry("a"), text=b"secret words"), entry("b")])
    index_db.backup()
    index_db.commit([replace(entry("a"), text=b"secret words and more")])
    assert kept_files(path.parent, b"secret words") == ["index.db", "index.db-wal", "index.db.bak"]
    index_db.commit([DropEntry("a", erased=True)])
    assert kept_files(path.parent, b"secret words") == []
    assert index_db.lacks_backup
    index_db.backup()
    assert not index_db.lacks_backup
    assert kept_files(path.parent, entry("b").text) == ["index.db", "index.db.bak"]


def test_a_file_shrinks_when_most_of_it_was_erased(path: Path) -> None:
    kept = [entry(f"e{n}", names=(("session_id", str(n)),)) for n in range(50)]
    with closing(IndexDb(path)) as index_db:
        index_db.commit([*ROWS, *kept[:25]])
        index_db.commit([replace(entry("a"), document=random.Random(1).randbytes(4 << 20))])
        index_db.commit(kept[25:])
        index_db.commit([TouchEntry("a", 1.0, None, 1)])
        index_db.backup()
        assert path.stat().st_size > 4 << 20
        index_db.commit([DropEntry("a", erased=True)])
        assert sum(each.stat().st_size for each in path.parent.iterdir()) < 1 << 20
        assert index_db.problems() == []
    with closing(IndexDb(path)) as index_db:
        assert index_db.blocks() == ROWS
        assert index_db.entries() == kept


def test_an_entry_that_another_one_replaces_does_not_cost_the_backup(
    path: Path, index_db: IndexDb
) -> None:
    index_db.commit([entry("a")])
    index_db.backup()
    index_db.commit([entry("b"), DropEntry("a")])
    assert path.with_name("index.db.bak").exists()
    assert not index_db.lacks_backup


# -- damage --------------------------------------------------------------------------------------


def ruin_zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def ruin_garbage(path: Path) -> None:
    path.write_bytes(random.Random(5).randbytes(path.stat().st_size))


def ruin_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def ruin_all(path: Path) -> None:
    path.write_bytes(b"")


def ruin_header(path: Path) -> None:
    flip(path, 3)


def ruin_version(path: Path) -> None:
    with closing(IndexDb(path)) as index_db:
        index_db.set_meta("schema", "999")


def ruin_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def ruin_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def ruin_log(path: Path) -> None:
    path.with_name("index.db-wal").mkdir()


RUINS = [
    *(ruin_zero, ruin_garbage, ruin_half, ruin_all, ruin_header),
    *(ruin_version, ruin_link, ruin_folder, ruin_log),
]


@pytest.mark.parametrize("ruin", RUINS)
def test_a_damaged_index_is_reported(path: Path, ruin: object) -> None:
    filled(path)
    assert callable(ruin)
    ruin(path)
    with pytest.raises(IndexDamaged):
        IndexDb(path)


def test_a_flipped_byte_is_reported_or_harmless(path: Path) -> None:
    """No other exception is raised, and no row has wrong types."""
    filled(path)
    whole = path.read_bytes()
    chance = random.Random(6)
    for _ in range(300):
        path.write_bytes(whole)
        flip(path, chance.randrange(len(whole)), 1 << chance.randrange(8))
        try:
            with closing(IndexDb(path)) as index_db:
                index_db.blocks()
                index_db.entries()
                index_db.dangling_names()
                index_db.problems()
        except IndexDamaged:
            pass


def test_a_row_of_another_type_is_damage(path: Path) -> None:
    for column in ("text", "segments", "packed", "hits"):
        filled(path)
        with closing(sqlite3.connect(path, isolation_level=None)) as db:
            db.execute(f"UPDATE entries SET {column} = 'no json' WHERE key = 'e7'")
        with closing(IndexDb(path)) as index_db, pytest.raises(IndexDamaged):
            index_db.entries()
        path.unlink()
