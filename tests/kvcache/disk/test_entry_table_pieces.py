from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.kvcache.disk.entry_table import NOTHING, PIECE_BYTES, SCHEMA, Contents, Pieces, cut
from tests.support.rounds import rounds

LONG = bytes(number % 251 for number in range(5 * PIECE_BYTES + 7))


@pytest.fixture
def db() -> Iterator[sqlite3.Connection]:
    with closing(new_db()) as made:
        yield made


def new_db() -> sqlite3.Connection:
    db = sqlite3.connect(":memory:", isolation_level=None)
    db.executescript(SCHEMA)
    return db


def stored(db: sqlite3.Connection) -> int:
    [count] = db.execute("SELECT count(*) FROM pieces").fetchone()
    return int(count)


# Few bytes and lengths around the edge of a piece, so that beginnings are often shared.
contents = st.tuples(
    st.lists(st.sampled_from(b"ab"), max_size=3),
    st.sampled_from([0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1]),
).map(lambda made: b"".join(bytes([byte]) * PIECE_BYTES for byte in made[0]) + b"c" * made[1])


@given(st.lists(st.tuples(contents, st.booleans()), max_size=rounds(12, 40)))
def test_only_used_contents_are_kept(steps: list[tuple[bytes, bool]]) -> None:
    with closing(new_db()) as db:
        table, held = Pieces(db), list[tuple[bytes, bytes]]()
        for content, is_put in steps:
            if is_put or not held:
                held.append((table.put(content), content))
            else:
                table.drop(held.pop(0)[0])
            found = Contents(db)
            assert [found.of(id_) for id_, _ in held] == [content for _, content in held]
            wanted = {piece.id for _, content in held for piece in cut(content)}
            assert stored(db) == len(wanted)


def test_longer_contents_add_only_their_end(db: sqlite3.Connection) -> None:
    table = Pieces(db)
    table.put(LONG)
    before = stored(db)
    table.put(LONG + b"x" * PIECE_BYTES)
    assert stored(db) == before + 2  # its last piece became a whole one, and one more


def test_empty_contents_have_their_own_id(db: sqlite3.Connection) -> None:
    table = Pieces(db)
    assert table.put(b"") == NOTHING
    table.drop(NOTHING)
    assert Contents(db).of(NOTHING) == b""


def test_uses_are_counted_again_from_the_entries(db: sqlite3.Connection) -> None:
    id_ = Pieces(db).put(LONG)
    columns = "key, root, packed, text, segments, replies, created_at, last_used_at, pinned, hits"
    values = "'k', x'', ?, ?, x'', x'', 0, 0, 0, 0, 0, x''"
    db.execute(f"INSERT INTO entries ({columns}, keyed, digest) VALUES ({values})", (id_, id_))
    again = Pieces(db)
    again.drop(id_)
    assert Contents(db).of(id_) == LONG
    again.drop(id_)
    assert stored(db) == 0


@pytest.mark.parametrize("column", ["id", "parent", "data"])
def test_a_damaged_piece_and_its_successors_are_missing(
    db: sqlite3.Connection, column: str
) -> None:
    table = Pieces(db)
    short, long = table.put(LONG[: 2 * PIECE_BYTES]), table.put(LONG)
    third = cut(LONG)[2].id
    db.execute(f"UPDATE pieces SET {column} = x'0102' WHERE id = ?", (third,))
    found = Contents(db)
    assert found.of(short) == LONG[: 2 * PIECE_BYTES]
    assert found.of(long) is None
    again = Pieces(db)
    assert again.put(LONG) == long  # as if it had never been there
    assert Contents(db).of(long) == LONG


def test_unused_pieces_are_removed_when_uses_are_counted(db: sqlite3.Connection) -> None:
    Pieces(db).put(LONG)
    Pieces(db).drop(NOTHING)
    assert stored(db) == 0
