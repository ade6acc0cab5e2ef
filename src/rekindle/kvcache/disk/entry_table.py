"""Entries in the index: a small row for each, its names, and what it says in pieces."""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any

from blake3 import blake3

from rekindle.kvcache.disk.index_rows import (
    EntryRow,
    TouchEntry,
    parse_text,
    text_bytes,
    typed,
    upsert,
)
from rekindle.kvcache.disk.pieces import Contents, Pieces

# What clients wrote is kept as bytes: SQLite's text refuses lone surrogates.
SCHEMA = """
CREATE TABLE entries (key TEXT PRIMARY KEY, root BLOB NOT NULL, packed BLOB NOT NULL,
  text BLOB NOT NULL, segments BLOB NOT NULL, replies BLOB NOT NULL, text_tokens INTEGER,
  created_at REAL NOT NULL, last_used_at REAL NOT NULL, ttl_s REAL, expires_at REAL,
  pinned INTEGER NOT NULL, hits INTEGER NOT NULL, keyed INTEGER NOT NULL, digest BLOB NOT NULL,
  kv_root BLOB, document BLOB NOT NULL DEFAULT x'');
"""
NAMES_SCHEMA = """
CREATE TABLE names (root BLOB NOT NULL, kind TEXT NOT NULL, name BLOB NOT NULL, entry TEXT NOT NULL,
  PRIMARY KEY (root, kind, name));
CREATE INDEX names_by_entry ON names (entry);
"""
# Columns that hold the id of their bytes.
_IN_PIECES = ("packed", "text", "segments", "replies", "document")
_COLUMNS = (
    *("key", "root", *_IN_PIECES, "text_tokens", "created_at", "last_used_at", "ttl_s"),
    *("expires_at", "pinned", "hits", "keyed", "digest", "kv_root"),
)
_MAYBE = (float, NoneType)
_TYPES = (
    *(str, bytes, *(bytes for _ in _IN_PIECES), (int, NoneType), float, float, _MAYBE),
    *(_MAYBE, int, int, int, bytes, (bytes, NoneType)),
)
_PUT = upsert("entries", _COLUMNS)
_PIECES_OF = f"SELECT {', '.join(_IN_PIECES)} FROM entries WHERE key = ?"
_SELECT = f"SELECT {', '.join(_COLUMNS)} FROM entries ORDER BY rowid"
_TOUCH = "UPDATE entries SET last_used_at = ?, expires_at = ?, hits = ? WHERE key = ?"

Ids = Mapping[str, bytes]  # of an entry's bytes, by their column


class EntryTable:
    """Called within a transaction of the index; `forget` after one that failed."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._pieces = Pieces(db)

    def put(self, entry: EntryRow) -> None:
        """Replace the entry and all its names; a name that another has moves to this one."""
        self.put_row(entry)
        self._db.execute("DELETE FROM names WHERE entry = ?", (entry.key,))
        for kind, name in entry.names:
            values = (entry.namespace, kind, text_bytes(name), entry.key)
            self._db.execute("INSERT OR REPLACE INTO names VALUES (?, ?, ?, ?)", values)

    def put_row(self, entry: EntryRow) -> None:
        """Replace the entry, not its names. What it shares with what it replaces stays."""
        ids = {column: self._pieces.put(raw) for column, raw in _contents(entry).items()}
        before = self._db.execute(_PIECES_OF, (entry.key,)).fetchone()
        self._db.execute(_PUT, _values(entry, ids))
        self._drop_pieces(before or ())

    def touch(self, use: TouchEntry) -> None:
        self._db.execute(_TOUCH, (use.last_used_at, use.expires_at, use.hits, use.key))

    def drop(self, key: str) -> None:
        before = self._db.execute(_PIECES_OF, (key,)).fetchone()
        self._db.execute("DELETE FROM names WHERE entry = ?", (key,))
        self._db.execute("DELETE FROM entries WHERE key = ?", (key,))
        self._drop_pieces(before or ())

    def _drop_pieces(self, ids: Sequence[bytes]) -> None:
        for id_ in ids:
            self._pieces.drop(id_)

    def forget(self) -> None:
        """The tables are not what they were taken for."""
        self._pieces.forget()

    def read(self) -> list[EntryRow]:
        """All entries that are as they were put, with their names; ValueError: a row makes no
        sense."""
        names: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for key, kind, name in self._db.execute(
            "SELECT entry, kind, name FROM names ORDER BY rowid"
        ):
            names[key].append((kind, parse_text(name)))
        contents = Contents(self._db)
        found = (_parse(row, contents, names) for row in self._db.execute(_SELECT).fetchall())
        return [entry for entry in found if entry is not None]


def _contents(entry: EntryRow) -> dict[str, bytes]:
    """An entry's bytes; those of a conversation that goes on begin with those it had before."""
    segments = b"".join(json.dumps(segment).encode() + b"\n" for segment in entry.segments)
    return {
        "packed": entry.packed,
        "text": entry.text,
        "segments": segments,
        "replies": entry.replies,
        "document": entry.document,
    }


def _values(entry: EntryRow, ids: Ids) -> tuple[Any, ...]:
    values = {column: getattr(entry, column, None) for column in _COLUMNS}
    values |= ids
    values["root"] = entry.namespace  # the column is as old as the first index
    values["kv_root"] = entry.kv_namespace
    values["digest"] = _digest(entry, ids)
    return tuple(values.values())


def _digest(entry: EntryRow, ids: Ids) -> bytes:
    """Of what an entry promises: SQLite's pages have no checksums, and tokens that do not spell
    their text would be a wrong answer. What a use changes is left out."""
    ttl_s = None if entry.ttl_s is None else entry.ttl_s + 0.0  # SQLite knows no -0.0
    # Of an entry without a document, it is the digest of version 4.
    named = {column: id_.hex() for column, id_ in ids.items() if id_ or column != "document"}
    promised = (entry.key, entry.namespace.hex(), named, entry.text_tokens)
    everything: list[Any] = [promised, ttl_s, entry.pinned, entry.keyed]
    if entry.kv_namespace is not None:  # else it is the digest of version 3
        everything.append(entry.kv_namespace.hex())
    return blake3(json.dumps(everything).encode()).digest()


def _parse(
    row: Sequence[Any], contents: Contents, names: Mapping[str, Sequence[tuple[str, str]]]
) -> EntryRow | None:
    """The entry as it was put; None: it is another."""
    values = dict(zip(_COLUMNS, typed(row, _TYPES), strict=True))
    ids = {column: values.pop(column) for column in _IN_PIECES}
    found = {column: contents.of(id_) for column, id_ in ids.items()}
    if any(raw is None for raw in found.values()):
        return None
    digest = values.pop("digest")
    values |= found
    values["namespace"] = values.pop("root")
    values["kv_namespace"] = values.pop("kv_root")
    values["segments"] = _segments(values["segments"])
    values["names"] = tuple(names.get(values["key"], ()))
    values |= {column: bool(values[column]) for column in ("pinned", "keyed")}
    entry = EntryRow(**values)
    return entry if _digest(entry, ids) == digest else None


def _segments(raw: bytes) -> tuple[tuple[str, str], ...]:
    pairs = (json.loads(line) for line in raw.splitlines())
    return tuple((str(kind), str(digest)) for kind, digest in pairs)
