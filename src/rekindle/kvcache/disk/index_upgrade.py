"""From each older version of the index to this one. Entries are only there: an upgrade must not
lose pins."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from types import NoneType
from typing import Any

from blake3 import blake3

from rekindle.kvcache.disk import entry_table, pieces
from rekindle.kvcache.disk.entry_table import EntryRow, EntryTable, typed

UPGRADED = ("1", "2", "3", "4")

_TO_2 = """
ALTER TABLE entries ADD COLUMN text_tokens INTEGER;
ALTER TABLE entries ADD COLUMN replies BLOB NOT NULL DEFAULT x'';
"""
_TO_4 = "ALTER TABLE entries ADD COLUMN kv_root BLOB"
_TO_5 = "ALTER TABLE entries ADD COLUMN document BLOB NOT NULL DEFAULT x''"
# Version 2 kept all of an entry in its row, which was written anew at every use.
_SELECT_2 = """
SELECT key, root, packed, text, segments, created_at, last_used_at, ttl_s, expires_at, pinned, hits,
  keyed, text_tokens, replies, digest FROM entries ORDER BY rowid
"""
_MAYBE = (float, NoneType)
_TYPES_2 = (
    *(str, bytes, bytes, bytes, str, float, float, _MAYBE, _MAYBE, int, int, int),
    *((int, NoneType), bytes, bytes),
)


def upgrade(db: sqlite3.Connection, version: str) -> None:
    """Make an index of an older version one of this; all of it or nothing."""
    db.execute("BEGIN IMMEDIATE")
    match version:
        case "4":
            _run(db, _TO_5)
        case "3":
            _run(db, f"{_TO_4}; {_TO_5}")
        case _:
            _upgrade_2(db, version)
    db.execute("UPDATE meta SET value = '5' WHERE key = 'schema'")
    db.execute("COMMIT")


def _upgrade_2(db: sqlite3.Connection, version: str) -> None:
    if version == "1":
        _run(db, _TO_2)
    entries = [_parse_2(row) for row in db.execute(_SELECT_2).fetchall()]
    _run(db, f"DROP TABLE entries; {entry_table.ENTRY_SCHEMA} {pieces.SCHEMA}")
    table = EntryTable(db)
    for entry in entries:
        if entry is not None:
            table.put_row(entry)
    db.execute("DELETE FROM names WHERE entry NOT IN (SELECT key FROM entries)")


def _run(db: sqlite3.Connection, script: str) -> None:
    """Statements one by one: `executescript` would commit what is under way."""
    for statement in filter(str.strip, script.split(";")):
        db.execute(statement)


def _parse_2(row: Sequence[Any]) -> EntryRow | None:
    """The entry as it was put, without its names; None: it is another."""
    *values, digest = typed(row, _TYPES_2)
    key, root, packed, text, segments, *times, pinned, hits, keyed, text_tokens, replies = values
    created_at, last_used_at, ttl_s, expires_at = times
    entry = EntryRow(
        key=key,
        namespace=root,
        packed=packed,
        text=text,
        segments=tuple((str(kind), str(hash_)) for kind, hash_ in json.loads(segments)),
        created_at=created_at,
        last_used_at=last_used_at,
        ttl_s=ttl_s,
        expires_at=expires_at,
        pinned=bool(pinned),
        hits=hits,
        keyed=bool(keyed),
        text_tokens=text_tokens,
        replies=replies,
    )
    return entry if _digest_2(entry) == digest else None


def _digest_2(entry: EntryRow) -> bytes:
    ttl_s = None if entry.ttl_s is None else entry.ttl_s + 0.0
    promised = (entry.key, entry.segments, ttl_s, entry.pinned, entry.keyed)
    parts = [entry.namespace, entry.packed, entry.text, json.dumps(promised).encode()]
    if entry.replies or entry.text_tokens is not None:  # else it is the digest of version 1
        parts += entry.replies, str(entry.text_tokens).encode()
    hasher = blake3()
    for part in parts:
        hasher.update(len(part).to_bytes(8, "big"))
        hasher.update(part)
    return hasher.digest()
