"""What the index on disk holds, row by row, and the changes that can be made to it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

from blake3 import blake3

SCHEMA_VERSION = "2"
# What clients wrote is kept as bytes: SQLite's text refuses lone surrogates.
SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE blocks (key BLOB PRIMARY KEY, parent BLOB NOT NULL, root BLOB NOT NULL,
  packed BLOB NOT NULL, size_bytes INTEGER NOT NULL, exact INTEGER NOT NULL);
CREATE TABLE entries (key TEXT PRIMARY KEY, root BLOB NOT NULL, packed BLOB NOT NULL,
  text BLOB NOT NULL, segments TEXT NOT NULL, created_at REAL NOT NULL, last_used_at REAL NOT NULL,
  ttl_s REAL, expires_at REAL, pinned INTEGER NOT NULL, hits INTEGER NOT NULL,
  keyed INTEGER NOT NULL, text_tokens INTEGER, replies BLOB NOT NULL, digest BLOB NOT NULL);
CREATE TABLE names (root BLOB NOT NULL, kind TEXT NOT NULL, name BLOB NOT NULL, entry TEXT NOT NULL,
  PRIMARY KEY (root, kind, name));
CREATE INDEX names_by_entry ON names (entry);
INSERT INTO meta VALUES ('schema', '{SCHEMA_VERSION}');
COMMIT;
"""
# From each older version to the next. Entries are only here: an upgrade must not lose pins.
UPGRADES = {
    "1": """
BEGIN IMMEDIATE;
ALTER TABLE entries ADD COLUMN text_tokens INTEGER;
ALTER TABLE entries ADD COLUMN replies BLOB NOT NULL DEFAULT x'';
UPDATE meta SET value = '2' WHERE key = 'schema';
COMMIT;
"""
}
_BLOCK = ("key", "parent", "root", "packed", "size_bytes", "exact")
_BLOCK_TYPES = (bytes, bytes, bytes, bytes, int, int)
_ENTRY = (
    *("key", "root", "packed", "text", "segments", "created_at", "last_used_at"),
    *("ttl_s", "expires_at", "pinned", "hits", "keyed", "text_tokens", "replies", "digest"),
)
_MAYBE = (float, NoneType)
_ENTRY_TYPES = (
    *(str, bytes, bytes, bytes, str, float, float),
    *(_MAYBE, _MAYBE, int, int, int, (int, NoneType), bytes, bytes),
)

SELECT_BLOCKS = f"SELECT {', '.join(_BLOCK)} FROM blocks ORDER BY rowid"
SELECT_ENTRIES = f"SELECT {', '.join(_ENTRY)} FROM entries ORDER BY rowid"
SELECT_NAMES = "SELECT entry, kind, name FROM names ORDER BY rowid"
SELECT_DANGLING = (
    "SELECT root, kind, name FROM names WHERE entry NOT IN (SELECT key FROM entries) ORDER BY rowid"
)


@dataclass(frozen=True, slots=True)
class BlockRow:
    key: bytes
    parent: bytes
    namespace: bytes
    packed: bytes
    size_bytes: int  # of its file
    exact: bool
    resumable: bool = False


@dataclass(frozen=True, slots=True)
class EntryRow:
    key: str
    namespace: bytes
    packed: bytes
    text: bytes  # rendered, with marks: no UTF-8
    segments: tuple[tuple[str, str], ...]  # (type, hash)
    created_at: float
    last_used_at: float
    ttl_s: float | None
    expires_at: float | None
    pinned: bool
    hits: int
    keyed: bool
    names: tuple[tuple[str, str], ...] = ()  # (kind, name)
    text_tokens: int | None = None  # how many tokens the text stands for, if not for all
    replies: bytes = b""  # packed; empty when there are none


@dataclass(frozen=True, slots=True)
class PutBlock:
    row: BlockRow


@dataclass(frozen=True, slots=True)
class DropBlock:
    key: bytes


@dataclass(frozen=True, slots=True)
class PutEntry:
    """Replaces the entry and all its names; a name that another entry has moves to this one."""

    row: EntryRow


@dataclass(frozen=True, slots=True)
class TouchEntry:
    """A use of an entry; of one that is gone, nothing."""

    key: str
    last_used_at: float
    expires_at: float | None
    hits: int


@dataclass(frozen=True, slots=True)
class DropEntry:
    key: str


@dataclass(frozen=True, slots=True)
class DropName:
    namespace: bytes
    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class SetMeta:
    key: str
    value: str


Change = PutBlock | DropBlock | PutEntry | TouchEntry | DropEntry | DropName | SetMeta
Statement = tuple[str, tuple[Any, ...]]


def statements(change: Change) -> Iterator[Statement]:
    """A change as SQL."""
    match change:
        case PutBlock(block):
            yield _PUT_BLOCK, _block_values(block)
        case DropBlock(block_key):
            yield "DELETE FROM blocks WHERE key = ?", (block_key,)
        case PutEntry(entry):
            yield "DELETE FROM names WHERE entry = ?", (entry.key,)
            yield _PUT_ENTRY, _entry_values(entry)
            for kind, name in entry.names:
                values = (entry.namespace, kind, text_bytes(name), entry.key)
                yield "INSERT OR REPLACE INTO names VALUES (?, ?, ?, ?)", values
        case TouchEntry(key, last_used_at, expires_at, hits):
            yield _TOUCH_ENTRY, (last_used_at, expires_at, hits, key)
        case DropEntry(key):
            yield "DELETE FROM names WHERE entry = ?", (key,)
            yield "DELETE FROM entries WHERE key = ?", (key,)
        case DropName(namespace, kind, name):
            drop = "DELETE FROM names WHERE root = ? AND kind = ? AND name = ?"
            yield drop, (namespace, kind, text_bytes(name))
        case SetMeta(key, value):
            yield "INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value)


def _upsert(table: str, columns: Sequence[str]) -> str:
    """Replaces a row where it is, so that rows stay in the order in which they first came."""
    updates = ", ".join(f"{column} = excluded.{column}" for column in columns[1:])
    marks = ", ".join("?" * len(columns))
    return (
        f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks}) "
        f"ON CONFLICT (key) DO UPDATE SET {updates}"
    )


_PUT_BLOCK = _upsert("blocks", _BLOCK)
_PUT_ENTRY = _upsert("entries", _ENTRY)
_TOUCH_ENTRY = "UPDATE entries SET last_used_at = ?, expires_at = ?, hits = ? WHERE key = ?"


def _field(column: str) -> str:
    """A column's name in Python; the one that differs is as old as the first index."""
    return "namespace" if column == "root" else column


def _block_values(block: BlockRow) -> tuple[Any, ...]:
    values = {column: getattr(block, _field(column)) for column in _BLOCK}
    values["exact"] = block.exact | block.resumable << 1
    return tuple(values.values())


def _entry_values(entry: EntryRow) -> tuple[Any, ...]:
    values = {column: getattr(entry, _field(column), None) for column in _ENTRY}
    values["segments"] = json.dumps(entry.segments)
    values["digest"] = _digest(entry)
    return tuple(values.values())


def _digest(entry: EntryRow) -> bytes:
    """Of what an entry promises: SQLite's pages have no checksums, and tokens that do not spell
    their text would be a wrong answer. What a use changes is left out."""
    ttl_s = None if entry.ttl_s is None else entry.ttl_s + 0.0  # SQLite knows no -0.0
    promised = json.dumps((entry.key, entry.segments, ttl_s, entry.pinned, entry.keyed)).encode()
    parts = [entry.namespace, entry.packed, entry.text, promised]
    if entry.replies or entry.text_tokens is not None:  # else it is the digest of version 1
        parts += entry.replies, str(entry.text_tokens).encode()
    hasher = blake3()
    for part in parts:
        hasher.update(len(part).to_bytes(8, "big"))
        hasher.update(part)
    return hasher.digest()


def parse_block(row: Sequence[Any]) -> BlockRow:
    """The row, or ValueError: SQLite does not check what a damaged page says of its columns."""
    key, parent, namespace, packed, size_bytes, kind = _typed(row, _BLOCK_TYPES)
    return BlockRow(key, parent, namespace, packed, size_bytes, bool(kind & 1), bool(kind & 2))


def parse_entry(
    row: Sequence[Any], names: Mapping[str, Sequence[tuple[str, str]]]
) -> EntryRow | None:
    """The entry as it was put; None: it is another."""
    *row, digest = _typed(row, _ENTRY_TYPES)
    key, namespace, packed, text, segments, *times, pinned, hits, keyed, text_tokens, replies = row
    created_at, last_used_at, ttl_s, expires_at = times
    entry = EntryRow(
        key=key,
        namespace=namespace,
        packed=packed,
        text=text,
        segments=tuple((str(kind), str(digest)) for kind, digest in json.loads(segments)),
        created_at=created_at,
        last_used_at=last_used_at,
        ttl_s=ttl_s,
        expires_at=expires_at,
        pinned=bool(pinned),
        hits=hits,
        keyed=bool(keyed),
        names=tuple(names.get(key, ())),
        text_tokens=text_tokens,
        replies=replies,
    )
    return entry if _digest(entry) == digest else None


def _typed(row: Sequence[Any], types: Sequence[Any]) -> Sequence[Any]:
    if not all(map(isinstance, row, types)):
        raise ValueError("a column is of another type")
    return row


def text_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def parse_text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")
