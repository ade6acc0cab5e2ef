"""An index that an earlier version left opens with all that it promised."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from rekindle.errors import IndexDamaged
from rekindle.kvcache.disk.index_db import SCHEMA_VERSION, EntryRow, IndexDb, PutEntry
from rekindle.kvcache.entries.entry import Reply, decode_replies
from tests.kvcache.records import chain, entry, row_of

ROOT = "X'9FEF913FC4658B16AF564FC243F125BD64E3BE7770F9D5695434DF4C543B76E9'"
#: As version 2 wrote it: an entry's row held all of it, its replies as one list.
VERSION_2 = f"""
CREATE TABLE blocks (key BLOB PRIMARY KEY, parent BLOB NOT NULL, root BLOB NOT NULL,
  packed BLOB NOT NULL, size_bytes INTEGER NOT NULL, exact INTEGER NOT NULL);
INSERT INTO "blocks"
  VALUES (X'5A5049BE458B8134A4A7BA5FDAC0FBB210BBDDC00B0A71FB67FE24A49D7F34F9',
  {ROOT},{ROOT},
  X'000003600000018A000003080000038F',229,0);
CREATE TABLE entries (key TEXT PRIMARY KEY, root BLOB NOT NULL, packed BLOB NOT NULL,
  text BLOB NOT NULL, segments TEXT NOT NULL, created_at REAL NOT NULL, last_used_at REAL NOT NULL,
  ttl_s REAL, expires_at REAL, pinned INTEGER NOT NULL, hits INTEGER NOT NULL,
  keyed INTEGER NOT NULL, text_tokens INTEGER, replies BLOB NOT NULL, digest BLOB NOT NULL);
INSERT INTO "entries"
  VALUES ('e',
  {ROOT},
  X'000000010000000200000003',
  X'68656C6C6F',
  '[["system", "ab"], ["turn", "cd"]]',
  1.5,2.5,NULL,NULL,1,3,1,NULL,
  X'',
  X'78575A02DEFFE2AB08C7BA98A8E4BCA560B6E239734BC59265473C12D576801D');
INSERT INTO "entries"
  VALUES ('f',
  {ROOT},
  X'000000010000000200000003',
  X'68656C6C6F',
  '[["system", "ab"], ["turn", "cd"]]',
  1.5,9.5,1800.0,10.5,0,7,1,2,
  X'919691A6736169643A31C4027B7D01020304',
  X'77D21B3DA18F9963F4C3C62478DED2C6E84288B8C80688BC73A0CFB50CA83A48');
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
INSERT INTO "meta" VALUES('schema','2');
CREATE TABLE names (root BLOB NOT NULL, kind TEXT NOT NULL, name BLOB NOT NULL, entry TEXT NOT NULL,
  PRIMARY KEY (root, kind, name));
INSERT INTO "names" VALUES({ROOT},'session_id',X'73','e');
CREATE INDEX names_by_entry ON names (entry);
"""
TO_VERSION_1 = """
DELETE FROM entries WHERE key = 'f';
ALTER TABLE entries DROP COLUMN replies;
ALTER TABLE entries DROP COLUMN text_tokens;
UPDATE meta SET value = '1' WHERE key = 'schema';
"""
TO_VERSION_4 = """
ALTER TABLE entries DROP COLUMN document; UPDATE meta SET value = '4' WHERE key = 'schema';
"""
TO_VERSION_3 = """
ALTER TABLE entries DROP COLUMN kv_root; UPDATE meta SET value = '3' WHERE key = 'schema';
"""
PINNED = entry("e", pinned=True, names=(("session_id", "s"),))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "index.db"


def write(path: Path, *scripts: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        for script in scripts:
            db.executescript(script)


def is_sound(index_db: IndexDb) -> bool:
    return index_db.meta("schema") == SCHEMA_VERSION and not index_db.problems()


def used(row: EntryRow) -> EntryRow:
    return replace(row, last_used_at=9.5, expires_at=10.5, hits=7)


def test_version_1_keeps_what_it_promised(path: Path) -> None:
    write(path, VERSION_2, TO_VERSION_1)
    for _ in range(2):
        with closing(IndexDb(path)) as index_db:
            assert index_db.entries() == [PINNED]
            assert is_sound(index_db)


def test_version_2_keeps_what_it_promised(path: Path) -> None:
    write(path, VERSION_2)
    for _ in range(2):
        with closing(IndexDb(path)) as index_db:
            pinned, other = index_db.entries()
            assert pinned == PINNED
            assert replace(other, replies=b"", text_tokens=None) == used(entry("f"))
            assert other.text_tokens == 2
            assert decode_replies(other.replies) == (Reply(("said:1",), b"{}", 1, 2, 3, 4),)
            assert index_db.blocks() == [row_of(record) for record in chain(1)]
            assert is_sound(index_db)


def test_version_3_keeps_what_it_promised(path: Path) -> None:
    """It knew of no state beside a tenant's usual one."""
    with closing(IndexDb(path)) as index_db:
        index_db.commit([PutEntry(PINNED)])
    write(path, TO_VERSION_4, TO_VERSION_3)
    other = replace(entry("f"), kv_namespace=b"k" * 32)
    with closing(IndexDb(path)) as index_db:
        assert index_db.entries() == [PINNED]
        index_db.commit([PutEntry(other)])
        assert index_db.entries() == [PINNED, other]
        assert is_sound(index_db)


def test_version_4_keeps_what_it_promised(path: Path) -> None:
    """It knew of no documents."""
    with closing(IndexDb(path)) as index_db:
        index_db.commit([PutEntry(PINNED)])
    write(path, TO_VERSION_4)
    other = replace(entry("f"), document=b"stored " * 2000)
    with closing(IndexDb(path)) as index_db:
        assert index_db.entries() == [PINNED]
        index_db.commit([PutEntry(other)])
        assert index_db.entries() == [PINNED, other]
        assert is_sound(index_db)


def test_what_was_upgraded_is_changed_like_any_other(path: Path) -> None:
    write(path, VERSION_2)
    longer = replace(PINNED, packed=PINNED.packed * 2000, text=b"longer")
    with closing(IndexDb(path)) as index_db:
        index_db.commit([PutEntry(longer)])
        assert index_db.entries()[0] == longer


def test_an_entry_that_was_damaged_before_is_not_believed_after(path: Path) -> None:
    write(path, VERSION_2, "UPDATE entries SET pinned = 0, text = X'00' WHERE key = 'e'")
    with closing(IndexDb(path)) as index_db:
        assert [each.key for each in index_db.entries()] == ["f"]
        assert index_db.dangling_names() == []


def test_rows_that_make_no_sense_are_damage_and_stay_as_they_are(path: Path) -> None:
    write(path, VERSION_2, "UPDATE entries SET hits = 'no number'")
    for _ in range(2):
        with pytest.raises(IndexDamaged):
            IndexDb(path)
