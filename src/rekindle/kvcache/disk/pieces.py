"""Stores the contents of entries in pieces, so that a continued conversation writes only its
end."""

from __future__ import annotations

import sqlite3
from collections import Counter, defaultdict
from typing import NamedTuple

from blake3 import blake3

PIECE_BYTES = 3968  # with its ids it fills one page of SQLite
NOTHING = b""  # the id of empty contents

SCHEMA = """
CREATE TABLE pieces (id BLOB PRIMARY KEY, parent BLOB NOT NULL, data BLOB NOT NULL);
"""


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
    """The table of pieces. Used within a transaction of the index; call `forget` after a failed
    one.

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
            [parent] = self._db.execute("SELECT parent FROM pieces WHERE id = ?", (id_,)).fetchone()
            self._db.execute("DELETE FROM pieces WHERE id = ?", (id_,))
            id_ = parent
            if id_ != NOTHING:
                uses[id_] -= 1

    def forget(self) -> None:
        """Count again at the next use, because the table has changed."""
        self._uses = None

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
        for (id_,) in self._db.execute("SELECT id FROM pieces").fetchall():
            if id_ not in parents:
                self._db.execute("DELETE FROM pieces WHERE id = ?", (id_,))
        ends = self._db.execute("SELECT packed, text, segments, replies, document FROM entries")
        used = (*parents.values(), *(id_ for row in ends for id_ in row))
        uses = Counter(dict.fromkeys(parents, 0))
        uses.update(id_ for id_ in used if id_ in parents)
        return uses


class Contents:
    """All pieces whose data match their ids, to be joined."""

    def __init__(self, db: sqlite3.Connection) -> None:
        found = map(Piece._make, db.execute("SELECT id, parent, data FROM pieces"))
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
