"""The rows of the index and the changes to them; reads and writes the table of entries.

An entry has a small row, its names, and its contents in pieces. Conversations share pieces, so a
continued one writes only its end.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from types import NoneType
from typing import Any, NamedTuple

from blake3 import blake3
from msgspec import Struct
from msgspec.structs import replace

from rekindle.kvcache.codec import Record, RecordHeader
from rekindle.tokens import Tokens

PIECE_BYTES = 3968  # with its ids it fills one page of SQLite
NOTHING = b""  # the id of empty contents


def select(db: sqlite3.Connection, query: str, values: Sequence[Any] = ()) -> list[Any]:
    """All rows of a query. Closes the cursor also after a row that cannot be decoded, because an
    open cursor keeps the file locked after the connection is closed."""
    with closing(db.execute(query, values)) as cursor:
        return cursor.fetchall()


class Piece(NamedTuple):
    id: bytes  # a digest of all contents up to its end
    parent: bytes  # the id of the piece before it
    data: bytes


def cut(content: bytes) -> list[Piece]:
    """Split contents. Equal prefixes give equal pieces."""
    pieces: list[Piece] = []
    parent = NOTHING
    for start in range(0, len(content), PIECE_BYTES):
        data = content[start : start + PIECE_BYTES]
        pieces.append(Piece(_id(parent, data), parent, data))
        parent = pieces[-1].id
    return pieces


def _id(parent: bytes, data: bytes) -> bytes:
    return blake3(len(parent).to_bytes(8, "big") + parent + data).digest()


class Pieces:
    """The table of pieces. Used within a transaction of the index, and not after a failed one.

    Uses are counted in memory only. A count next to the data would cost as much as writing the
    data.
    """

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._uses: Counter[bytes] | None = None

    def put(self, content: bytes) -> bytes:
        """Store the missing pieces, count one use, and return the id of the contents."""
        uses, pieces = self._counted(), cut(content)
        known = next((n for n in range(len(pieces), 0, -1) if pieces[n - 1].id in uses), 0)
        for piece in pieces[known:]:
            self._db.execute("INSERT INTO pieces VALUES (?, ?, ?)", piece)
            uses[piece.id] = 0
            self._use(piece.parent)
        last = pieces[-1].id if pieces else NOTHING
        self._use(last)
        return last

    def _use(self, id_: bytes) -> None:
        if id_ != NOTHING:
            self._counted()[id_] += 1

    def drop(self, id_: bytes) -> None:
        """Undo one use, and remove pieces that nobody uses any more."""
        uses = self._counted()
        if uses[id_] > 0:
            uses[id_] -= 1
            self._remove_unused(id_)

    def _remove_unused(self, id_: bytes) -> None:
        uses = self._counted()
        while id_ != NOTHING and not uses[id_]:
            del uses[id_]
            [[parent]] = select(self._db, "SELECT parent FROM pieces WHERE id = ?", (id_,))
            self._db.execute("DELETE FROM pieces WHERE id = ?", (id_,))
            id_ = parent
            if id_ != NOTHING:
                uses[id_] -= 1

    def _counted(self) -> Counter[bytes]:
        if self._uses is None:
            self._uses = self._count()
            for id_ in [id_ for id_, uses in self._uses.items() if not uses]:
                self._remove_unused(id_)
        return self._uses

    def _count(self) -> Counter[bytes]:
        """Count the uses of complete pieces. Others are removed, because contents that begin with
        them could not be stored otherwise."""
        parents = Contents(self._db).parents()
        for (id_,) in select(self._db, "SELECT id FROM pieces"):
            if id_ not in parents:
                self._db.execute("DELETE FROM pieces WHERE id = ?", (id_,))
        ends = select(self._db, "SELECT packed, text, segments, replies, document FROM entries")
        used = (*parents.values(), *(id_ for row in ends for id_ in row))
        uses = Counter(dict.fromkeys(parents, 0))
        uses.update(id_ for id_ in used if id_ in parents)
        return uses


class Contents:
    """All pieces whose data match their ids, to be joined."""

    def __init__(self, db: sqlite3.Connection) -> None:
        found = map(Piece._make, select(db, "SELECT id, parent, data FROM pieces"))
        self._pieces = {each.id: each for each in found if _id(each.parent, each.data) == each.id}

    def of(self, id_: bytes) -> bytes | None:
        """The contents with this id, or None if a piece is missing."""
        parts: list[bytes] = []
        while id_ != NOTHING:
            piece = self._pieces.get(id_)
            if piece is None:
                return None
            parts.append(piece.data)
            id_ = piece.parent
        return b"".join(reversed(parts))

    def parents(self) -> dict[bytes, bytes]:
        """The parent of each piece whose whole prefix is here."""
        after: dict[bytes, list[bytes]] = defaultdict(list)
        for piece in self._pieces.values():
            after[piece.parent].append(piece.id)
        whole, ends = dict[bytes, bytes](), [NOTHING]
        for end in ends:  # the list grows while it is walked
            whole |= dict.fromkeys(after[end], end)
            ends += after[end]
        return whole


_BLOCK = ("key", "parent", "root", "packed", "size_bytes", "exact")
_BLOCK_TYPES = (bytes, bytes, bytes, bytes, int, int)
SELECT_BLOCKS = f"SELECT {', '.join(_BLOCK)} FROM blocks ORDER BY rowid"


class BlockRow(NamedTuple):
    """A block in the index. A tuple, because millions of them are read."""

    key: bytes
    parent: bytes
    namespace: bytes
    packed: bytes
    size_bytes: int  # of its file
    kind: int  # 1 if it is exact, plus 2 if it is resumable

    @classmethod
    def of(
        cls, key: bytes, source: Record | RecordHeader, tokens: Tokens, size_bytes: int
    ) -> BlockRow:
        kind = source.exact | source.resumable << 1
        return cls(key, source.parent, source.namespace, tokens.packed, size_bytes, kind)

    @classmethod
    def parse(cls, row: tuple[Any, ...]) -> BlockRow:
        """Check the types of a row. SQLite does not check those of a damaged page."""
        return cls._make(_typed(row, _BLOCK_TYPES))


class EntryRow(Struct, frozen=True):
    key: str
    namespace: bytes
    packed: bytes
    text: bytes  # rendered, with marks, so not UTF-8
    segments: tuple[tuple[str, str], ...]  # (type, hash)
    created_at: float
    last_used_at: float
    ttl_s: float | None
    expires_at: float | None
    pinned: bool
    hits: int
    keyed: bool
    names: tuple[tuple[str, str], ...] = ()  # (kind, name)
    text_tokens: int | None = None  # tokens that the text stands for, if not all
    replies: bytes = b""  # encoded; empty if there are none
    document: bytes = b""  # stored by a client; empty if there is none
    kv_namespace: bytes | None = None  # of its state, if not the tenant's default
    pictures: tuple[bytes, ...] = ()  # the digests of its images


class DropBlock(Struct, frozen=True):
    key: bytes


class TouchEntry(Struct, frozen=True):
    """Records a use of an entry. Ignored if the entry is gone."""

    key: str
    last_used_at: float
    expires_at: float | None
    hits: int


class DropEntry(Struct, frozen=True):
    """Removes an entry. `erased`: a client deleted it, so no other file may keep its contents."""

    key: str
    erased: bool = False


#: A row replaces the one with its key. An entry takes its names from other entries.
Change = BlockRow | DropBlock | EntryRow | TouchEntry | DropEntry


def upsert(table: str, columns: Sequence[str]) -> str:
    """A statement that replaces a row in place, so that rows keep their order."""
    updates = ", ".join(f"{column} = excluded.{column}" for column in columns[1:])
    marks = ", ".join("?" * len(columns))
    return (
        f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks}) "
        f"ON CONFLICT (key) DO UPDATE SET {updates}"
    )


PUT_BLOCK = upsert("blocks", _BLOCK)


def _typed(row: Sequence[Any], types: Sequence[Any]) -> Sequence[Any]:
    if not all(map(isinstance, row, types)):
        raise ValueError("a column is of another type")
    return row


# Text of clients is stored as bytes because SQLite's text refuses lone surrogates.
SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE blocks (key BLOB PRIMARY KEY, parent BLOB NOT NULL, root BLOB NOT NULL,
  packed BLOB NOT NULL, size_bytes INTEGER NOT NULL, exact INTEGER NOT NULL);
CREATE TABLE entries (key TEXT PRIMARY KEY, root BLOB NOT NULL, packed BLOB NOT NULL,
  text BLOB NOT NULL, segments BLOB NOT NULL, replies BLOB NOT NULL, text_tokens INTEGER,
  created_at REAL NOT NULL, last_used_at REAL NOT NULL, ttl_s REAL, expires_at REAL,
  pinned INTEGER NOT NULL, hits INTEGER NOT NULL, keyed INTEGER NOT NULL, digest BLOB NOT NULL,
  kv_root BLOB, document BLOB NOT NULL DEFAULT x'');
CREATE TABLE names (root BLOB NOT NULL, kind TEXT NOT NULL, name BLOB NOT NULL, entry TEXT NOT NULL,
  PRIMARY KEY (root, kind, name));
CREATE INDEX names_by_entry ON names (entry);
CREATE TABLE pieces (id BLOB PRIMARY KEY, parent BLOB NOT NULL, data BLOB NOT NULL);
"""
# Columns that hold the id of their last piece.
_IN_PIECES = ("packed", "text", "segments", "replies", "document")
_COLUMNS = (
    *("key", "root", *_IN_PIECES, "text_tokens", "created_at", "last_used_at", "ttl_s"),
    *("expires_at", "pinned", "hits", "keyed", "digest", "kv_root"),
)
_CREATE_PICTURES = """CREATE TABLE IF NOT EXISTS pictures (entry TEXT NOT NULL,
  digest BLOB NOT NULL, PRIMARY KEY (entry, digest))"""
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
    """Used within a transaction of the index, and not after a failed one."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._pieces = Pieces(db)
        self._pictures = PictureTable(db)

    def put(self, entry: EntryRow) -> None:
        """Replace an entry and its names. Pieces that both versions share are kept."""
        ids = {column: self._pieces.put(raw) for column, raw in _contents(entry).items()}
        before = select(self._db, _PIECES_OF, (entry.key,))
        self._db.execute(_PUT, _values(entry, ids))
        self._drop_pieces(before)
        self._pictures.put(entry.key, entry.pictures)
        self._db.execute("DELETE FROM names WHERE entry = ?", (entry.key,))
        for kind, name in entry.names:
            values = (entry.namespace, kind, name.encode("utf-8", "surrogatepass"), entry.key)
            self._db.execute("INSERT OR REPLACE INTO names VALUES (?, ?, ?, ?)", values)

    def touch(self, use: TouchEntry) -> None:
        self._db.execute(_TOUCH, (use.last_used_at, use.expires_at, use.hits, use.key))

    def drop(self, key: str) -> None:
        before = select(self._db, _PIECES_OF, (key,))
        self._db.execute("DELETE FROM names WHERE entry = ?", (key,))
        self._db.execute("DELETE FROM entries WHERE key = ?", (key,))
        self._pictures.put(key, ())
        self._drop_pieces(before)

    def _drop_pieces(self, rows: list[Sequence[bytes]]) -> None:
        for id_ in (id_ for row in rows for id_ in row):
            self._pieces.drop(id_)

    def read(self) -> list[EntryRow]:
        """All intact entries with their names. Raises ValueError if a row cannot be parsed."""
        names: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for key, kind, name in select(
            self._db, "SELECT entry, kind, name FROM names ORDER BY rowid"
        ):
            names[key].append((kind, name.decode("utf-8", "surrogatepass")))
        contents = Contents(self._db)
        found = (_parse(row, contents, names) for row in select(self._db, _SELECT))
        pictures = self._pictures.read()
        return [
            replace(entry, pictures=pictures[entry.key]) if entry.key in pictures else entry
            for entry in found
            if entry is not None
        ]


class PictureTable:
    """The digests of the images in entries. It is created with the first image, because the indexes
    of earlier versions do not have it."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    @property
    def _exists(self) -> bool:
        return bool(select(self._db, "SELECT 1 FROM sqlite_master WHERE name = 'pictures'"))

    def put(self, entry: str, digests: Sequence[bytes]) -> None:
        """Replace the digests of an entry."""
        if digests:
            self._db.execute(_CREATE_PICTURES)
        if digests or self._exists:
            self._db.execute("DELETE FROM pictures WHERE entry = ?", (entry,))
        for digest in digests:
            self._db.execute("INSERT INTO pictures VALUES (?, ?)", (entry, digest))

    def read(self) -> dict[str, tuple[bytes, ...]]:
        """All digests by entry."""
        if not self._exists:
            return {}
        found: dict[str, tuple[bytes, ...]] = {}
        for row in select(self._db, "SELECT entry, digest FROM pictures ORDER BY rowid"):
            entry, digest = _typed(row, (str, bytes))
            found[entry] = (*found.get(entry, ()), digest)
        return found


def _contents(entry: EntryRow) -> dict[str, bytes]:
    """The contents of an entry. Those of a continued conversation begin with the earlier ones."""
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
    values["root"] = entry.namespace
    values["kv_root"] = entry.kv_namespace
    values["digest"] = _digest(entry, ids)
    return tuple(values.values())


def _digest(entry: EntryRow, ids: Ids) -> bytes:
    """A checksum of an entry, without the columns that a use changes. SQLite's pages have no
    checksums, and tokens that do not match their text would give a wrong answer."""
    ttl_s = None if entry.ttl_s is None else entry.ttl_s + 0.0  # SQLite has no -0.0
    # An empty document and a missing KV namespace are left out, as in earlier schema versions.
    named = {column: id_.hex() for column, id_ in ids.items() if id_ or column != "document"}
    promised = (entry.key, entry.namespace.hex(), named, entry.text_tokens)
    everything: list[Any] = [promised, ttl_s, entry.pinned, entry.keyed]
    if entry.kv_namespace is not None:
        everything.append(entry.kv_namespace.hex())
    return blake3(json.dumps(everything).encode()).digest()


def _parse(
    row: Sequence[Any], contents: Contents, names: Mapping[str, Sequence[tuple[str, str]]]
) -> EntryRow | None:
    """The entry, or None if its checksum disagrees."""
    values = dict(zip(_COLUMNS, _typed(row, _TYPES), strict=True))
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
