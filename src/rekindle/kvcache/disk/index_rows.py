"""What the index on disk holds, row by row, and the changes that can be made to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_BLOCK = ("key", "parent", "root", "packed", "size_bytes", "exact")
_BLOCK_TYPES = (bytes, bytes, bytes, bytes, int, int)
SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE blocks (key BLOB PRIMARY KEY, parent BLOB NOT NULL, root BLOB NOT NULL,
  packed BLOB NOT NULL, size_bytes INTEGER NOT NULL, exact INTEGER NOT NULL);
"""
SELECT_BLOCKS = f"SELECT {', '.join(_BLOCK)} FROM blocks ORDER BY rowid"


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
    document: bytes = b""  # that a client stored; empty when there is none
    kv_namespace: bytes | None = None  # of its state, if that is not the tenant's usual one


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


def put_block(block: BlockRow) -> tuple[Any, ...]:
    """The values of `PUT_BLOCK`."""
    kind = block.exact | block.resumable << 1
    return (block.key, block.parent, block.namespace, block.packed, block.size_bytes, kind)


#: Key, parent, namespace, packed tokens, size in bytes, kind: what millions are read as.
RawBlock = tuple[bytes, bytes, bytes, bytes, int, int]


def parse_raw(row: tuple[Any, ...]) -> RawBlock:
    """The row, or ValueError: SQLite does not check what a damaged page says of its columns."""
    if tuple(map(type, row)) != _BLOCK_TYPES:
        raise ValueError("a column is of another type")
    return row


def parse_block(raw: RawBlock) -> BlockRow:
    key, parent, namespace, packed, size_bytes, kind = raw
    return BlockRow(key, parent, namespace, packed, size_bytes, bool(kind & 1), bool(kind & 2))


def upsert(table: str, columns: Sequence[str]) -> str:
    """Replaces a row where it is, so that rows stay in the order in which they first came."""
    updates = ", ".join(f"{column} = excluded.{column}" for column in columns[1:])
    marks = ", ".join("?" * len(columns))
    return (
        f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks}) "
        f"ON CONFLICT (key) DO UPDATE SET {updates}"
    )


PUT_BLOCK = upsert("blocks", _BLOCK)


def typed(row: Sequence[Any], types: Sequence[Any]) -> Sequence[Any]:
    if not all(map(isinstance, row, types)):
        raise ValueError("a column is of another type")
    return row


def text_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def parse_text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")
