"""Tests that the replies of entries are limited, durable and found by their keys."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.kvcache.disk.entry_table import Change, EntryRow
from rekindle.kvcache.disk.index_db import IndexDb
from rekindle.kvcache.entries.entries import Draft, Entries
from rekindle.kvcache.entries.entry import (
    MAX_REPLIES,
    MAX_REPLY_BYTES,
    Clock,
    Reply,
    decode_replies,
    encode_replies,
    newest_replies,
)
from rekindle.kvcache.entries.index import ReplyIndex
from rekindle.kvcache.entries.retention import EntryLimits
from rekindle.kvcache.store import Store
from rekindle.kvcache.tiers.ram import RamTier
from rekindle.tokens import Tokens

ROOT = b"r" * 32


def reply(number: int, size_bytes: int = 10) -> Reply:
    return Reply((f"call:{number}", f"said:{number}"), b"x" * size_bytes, 5, 1, 2)


def draft(*tokens: int, text: bytes = b"text", **fields: object) -> Draft:
    return Draft(namespace=ROOT, tokens=Tokens.of(tokens), text=text, **fields)  # type: ignore[arg-type]


def entries(journal: list[Change] | None = None, *, limit_bytes: int = 1 << 20) -> Entries:
    store = Store(block_tokens=8, tiers=[RamTier(0)])
    keep = journal.append if journal is not None else None
    return Entries(store, Clock(), keep, EntryLimits(limit_bytes))


replies = st.builds(
    Reply,
    st.lists(st.text(), max_size=3).map(tuple),
    st.binary(),
    st.integers(0, 2**40),
    st.integers(0, 2**30),
    st.integers(0, 2**30),
)


@given(st.lists(replies).map(tuple))
def test_encoded_replies_can_be_decoded(known: tuple[Reply, ...]) -> None:
    assert decode_replies(encode_replies(known)) == known


@given(st.lists(replies, min_size=1, max_size=300).map(tuple))
def test_replies_of_an_earlier_version_are_decoded(known: tuple[Reply, ...]) -> None:
    assert decode_replies(msgspec.msgpack.encode(known)) == known


@given(st.lists(replies).map(tuple), replies)
def test_a_new_reply_only_appends_bytes(known: tuple[Reply, ...], more: Reply) -> None:
    assert encode_replies((*known, more)).startswith(encode_replies(known))


@given(st.binary())
def test_invalid_bytes_decode_to_no_replies(raw: bytes) -> None:
    assert all(isinstance(each, Reply) for each in decode_replies(raw))


def test_the_newest_replies_are_kept_within_the_limits() -> None:
    many = [reply(number) for number in range(2 * MAX_REPLIES)]
    assert newest_replies(many[:MAX_REPLIES]) == tuple(many[:MAX_REPLIES])
    assert newest_replies(many) == tuple(many[-MAX_REPLIES * 3 // 4 :])
    large = [reply(number, MAX_REPLY_BYTES // 3) for number in range(5)]
    assert newest_replies(large) == tuple(large[-2:])
    assert newest_replies([reply(0, MAX_REPLY_BYTES)]) == ()


def test_a_reply_is_found_as_long_as_an_owner_has_it() -> None:
    known: ReplyIndex[str] = ReplyIndex()
    known.put("old", [reply(1), reply(2)])
    known.put("new", [reply(1)])
    assert known.find("call:1") == [("new", reply(1)), ("old", reply(1))]
    known.put("old", [reply(1)])
    assert [owner for owner, _ in known.find("said:1")] == ["old", "new"]
    known.drop("old", [reply(1), reply(2)])
    assert known.find("call:1") == [("new", reply(1))]
    assert known.find("call:2") == []
    known.drop("new", [reply(1)])
    assert len(known) == 0


@pytest.mark.parametrize(
    ("bytes_", "tokens", "kept"),
    [
        (50, 9, (5, 4, 8, 10)),
        (10, 8, (5, 4, 8, 10)),
        (9, 8, (5, 4, 0, 0)),
        (10, 7, (5, 4, 0, 0)),
        (5, 4, (5, 4, 0, 0)),
        (4, 9, (0, 0, 0, 0)),
        (50, 3, (0, 0, 0, 0)),
    ],
)
def test_a_reply_in_a_common_prefix_is_valid_in_both_conversations(
    bytes_: int, tokens: int, kept: tuple[int, ...]
) -> None:
    still = Reply(("k",), b"m", 5, 4, 8, 10).kept(bytes_, tokens)
    assert still is not None
    assert still == Reply(("k",), b"m", *kept)
    plain = Reply(("k",), b"", 5, 4, 8, 10).kept(bytes_, tokens)
    assert plain == (Reply(("k",), b"", *kept) if any(kept) else None)


# -- entries -------------------------------------------------------------------------------------


def test_a_conversation_that_is_delivered_twice_has_both_replies() -> None:
    known = entries()
    one = known.remember(draft(1, 2, replies=(reply(1),)))
    other = known.remember(draft(1, 2, replies=(reply(2),)))
    assert one is other is not None
    assert known.index.replies(ROOT, "call:1") == [(one, reply(1))]
    assert known.index.replies(ROOT, "call:2") == [(one, reply(2))]
    assert known.index.replies(b"s" * 32, "call:1") == []


def test_replies_of_another_text_are_not_added() -> None:
    known = entries()
    known.remember(draft(1, 2, text=b"one", replies=(reply(1),)))
    known.remember(draft(1, 2, text=b"two", replies=(reply(2),)))
    assert known.index.replies(ROOT, "call:2") == []


def test_forgetting_an_entry_frees_its_replies() -> None:
    known = entries()
    for number in range(3):
        entry = known.remember(draft(number, replies=(reply(number), reply(number, 999))))
        assert entry is not None
        assert entry.cost_bytes > 1009
        known.remember(draft(number, replies=(reply(100 + number),)))
        known.forget(entry)
    assert not known.index.knows_replies(ROOT)
    assert known.retention.used_bytes == 0
    assert not known.retention.held_bytes


def test_replies_count_against_the_entry_budget() -> None:
    known = entries(limit_bytes=100_000)
    for number in range(50):
        known.remember(draft(number, text=b"%d" % number, replies=(reply(number, 20_000),)))
    assert 1 <= len(known) <= 5
    assert known.remember(draft(7, text=b"x", replies=(reply(1, 200_000),))) is None


def test_an_entry_is_superseded_by_its_continuation_without_common_text() -> None:
    known = entries()
    first = known.remember(draft(1, 2, 3, text=b"prompt", text_tokens=1))
    assert first is not None
    known.remember(draft(1, 9, text=b"prompt and more"))  # another reply to the same prompt
    assert len(known) == 2
    known.remember(draft(1, 2, 3, 4, text=b"prompt <call> more", after=first))
    assert first not in known.of(None)
    named = known.remember(draft(5, text=b"n", names=(("session_id", "s"),)))
    known.remember(draft(5, 6, text=b"m", after=named))
    assert named in known.of(None)


def test_entries_are_loaded_with_their_replies() -> None:
    journal: list[Change] = []
    known = entries(journal)
    known.remember(draft(1, 2, 3, text_tokens=2, replies=(reply(1), reply(2))))
    [change] = journal
    assert isinstance(change, EntryRow)
    again = entries()
    again.load([change])
    [(entry, found)] = again.index.replies(ROOT, "said:2")
    assert found == reply(2)
    assert (entry.text_tokens, len(entry.tokens), entry.first(2)) == (2, 3, [1, 2])
    assert again.retention.used_bytes == entry.cost_bytes == known.retention.used_bytes


# -- the index on disk ---------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["replies = x'90'", "text_tokens = 1", "replies = x''"])
def test_an_entry_whose_replies_were_changed_on_disk_is_dropped(
    tmp_path: Path, damage: str
) -> None:
    path = tmp_path / "index"
    journal: list[Change] = []
    entries(journal).remember(draft(1, 2, 3, replies=(reply(1),)))
    with closing(IndexDb(path)) as index_db:
        index_db.commit(journal)
        assert len(index_db.entries()) == 1
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute(f"UPDATE entries SET {damage}")
    with closing(IndexDb(path)) as index_db:
        assert index_db.entries() == []
