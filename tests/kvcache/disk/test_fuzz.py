"""Fuzzes block files and the index: a read gives the exact state or an error."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from rekindle.errors import CorruptBlock, IndexDamaged
from rekindle.kvcache.codec import seal
from rekindle.kvcache.disk.block_files import BlockFiles
from rekindle.kvcache.disk.entry_table import PIECE_BYTES, EntryRow
from rekindle.kvcache.disk.folder import open_block_files
from rekindle.kvcache.disk.index_db import IndexDb
from tests.kvcache.records import SECRET, chain, entry, key_of, size_of
from tests.support.rounds import rounds

[RECORD] = chain(1)
WHOLE = b"".join(map(bytes, seal(RECORD, SECRET)))
ENTRIES = [
    entry("a", pinned=True, names=(("session_id", "x"),)),
    replace(entry("b"), packed=bytes(2 * PIECE_BYTES), text=b"t" * 3 * PIECE_BYTES, replies=b"\0r"),
    replace(entry("d"), packed=b"", text=b"", document=b"d" * 2 * PIECE_BYTES),
]

fuzzed = settings(
    max_examples=rounds(100, 1500),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
spans = st.tuples(st.integers(0, len(WHOLE)), st.integers(0, len(WHOLE)), st.binary(max_size=64))


def spoilt(raw: bytes, edits: list[tuple[int, int, bytes]]) -> bytes:
    """Replaces random spans."""
    for start, length, new in edits:
        raw = raw[:start] + new + raw[start + length :]
    return raw


@pytest.fixture
def block_files(tmp_path: Path) -> Iterator[BlockFiles]:
    with ExitStack() as resources:
        yield open_block_files(tmp_path, SECRET, resources)


@pytest.mark.long
@fuzzed
@given(edits=st.lists(spans, max_size=4), keeps_size=st.booleans())
def test_a_damaged_block_is_corrupt_or_the_exact_bytes(
    block_files: BlockFiles, tmp_path: Path, edits: list[tuple[int, int, bytes]], keeps_size: bool
) -> None:
    """Files of the expected size, and of others."""
    raw = spoilt(WHOLE, edits)
    raw = raw[: len(WHOLE)].ljust(len(WHOLE), b"\0") if keeps_size else raw
    (tmp_path / "blocks" / key_of(RECORD).hex()).write_bytes(raw)
    try:
        found = block_files.read(key_of(RECORD), size_of(RECORD))
    except CorruptBlock:
        assert raw != WHOLE
    else:
        assert raw == WHOLE
        assert (found.tokens, bytes(found.blob)) == (RECORD.tokens, RECORD.blob)
    with suppress(CorruptBlock):
        header, tokens, _ = block_files.tentative(key_of(RECORD))
        assert (header.parent, tokens) == (RECORD.parent, RECORD.tokens)


values = st.none() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text() | st.binary()
columns = st.sampled_from(
    [
        *(
            ("entries", column)
            for column in ("key", "root", "packed", "text", "segments", "replies", "document")
        ),
        *(("entries", column) for column in ("text_tokens", "ttl_s", "pinned", "keyed", "digest")),
        *(("entries", column) for column in ("created_at", "last_used_at", "expires_at", "hits")),
        *(("pieces", column) for column in ("id", "parent", "data")),
        *(("names", column) for column in ("root", "kind", "name", "entry")),
        *(("meta", column) for column in ("key", "value")),
    ]
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("index") / "index.db"
    with closing(IndexDb(path)) as index_db:
        index_db.commit(ENTRIES)
    return path.read_bytes()


@pytest.mark.long
@fuzzed
@given(edits=st.lists(st.tuples(columns, st.integers(1, 9), values), min_size=1, max_size=3))
def test_a_damaged_row_is_reported_or_missing_or_exact(
    whole: bytes, tmp_path: Path, edits: list[tuple[tuple[str, str], int, object]]
) -> None:
    path = tmp_path / "index.db"
    path.write_bytes(whole)
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        for (table, column), row, value in edits:
            with suppress(sqlite3.Error, UnicodeEncodeError, OverflowError):
                db.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (value, row))
    with suppress(IndexDamaged), closing(IndexDb(path)) as index_db:
        promised = {each.key: promise(each) for each in ENTRIES}
        for found in index_db.entries():
            assert promise(found) == promised[found.key]


def promise(row: EntryRow) -> EntryRow:
    """An entry without times, uses and names, which may be damaged without a wrong answer."""
    return replace(row, created_at=0.0, last_used_at=0.0, expires_at=None, hits=0, names=())
