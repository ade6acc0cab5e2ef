from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rekindle.kvcache.disk.entry_table import Change, DropBlock, DropEntry, EntryRow, TouchEntry
from rekindle.kvcache.disk.writer import CHANGE_BYTES, PendingChanges
from tests.kvcache.records import entry

LARGE = b"x" * 1_000_000


def put(key: str, text: bytes = b"hello") -> EntryRow:
    return replace(entry(key), text=text)


def test_only_the_latest_change_of_a_row_is_kept() -> None:
    pending = PendingChanges()
    latest = put("a", b"longer")
    for change in (put("a"), DropBlock(b"k"), put("b"), latest, DropBlock(b"k"), DropEntry("b")):
        pending.add(change)
    assert pending.listed() == [latest, DropBlock(b"k"), DropEntry("b")]
    assert pending.listed()[0] is latest


def test_a_thousand_turns_on_a_failing_disk_take_the_memory_of_one() -> None:
    """Ten thousand changes of a megabyte each would take ten gigabytes."""
    pending = PendingChanges()
    for turn in range(1000):
        pending.add(put("a", LARGE))
        pending.add(TouchEntry("a", turn, None, turn))
    assert pending.size_bytes < 2 * len(LARGE)
    [change] = pending.listed()
    assert isinstance(change, EntryRow)
    assert (change.hits, change.text) == (999, LARGE)


def test_beyond_the_limit_the_oldest_entries_are_dropped_and_no_removal() -> None:
    pending = PendingChanges(10 * len(LARGE))
    for number in range(100):
        pending.add(DropEntry(f"gone {number}"))
        pending.add(put(f"e{number}", LARGE))
    kept = pending.listed()
    assert pending.size_bytes <= 10 * len(LARGE)
    assert [each.key for each in kept if isinstance(each, EntryRow)][-1] == "e99"
    assert len([each for each in kept if isinstance(each, DropEntry)]) == 100


def test_a_change_that_was_given_up_is_known_until_its_row_changes_again() -> None:
    pending = PendingChanges(2 * len(LARGE) + 5000)
    for key in "abc":
        pending.add(put(key, LARGE))
    assert [pending.has_given_up(key) for key in "abc"] == [True, False, False]
    pending.done(pending.listed())
    assert pending.has_given_up("a")
    pending.add(put("a", LARGE))
    assert not pending.has_given_up("a")


def test_removals_are_limited_too() -> None:
    pending = PendingChanges(50 * CHANGE_BYTES)
    for number in range(1000):
        pending.add(DropEntry(f"gone {number}"))
    assert len(pending) == 50
    assert pending.listed()[-1] == DropEntry("gone 999")


def test_changes_that_arrive_during_a_commit_keep_waiting() -> None:
    pending = PendingChanges()
    for change in (put("a"), put("b"), DropBlock(b"k")):
        pending.add(change)
    committed = pending.listed()
    newer = put("a", b"newer")
    pending.add(newer)
    pending.done(committed)
    assert pending.listed() == [newer]
    pending.done([newer])
    assert (len(pending), pending.size_bytes) == (0, 0)


keys = st.sampled_from("abc")
changes = st.one_of(
    st.builds(put, keys, st.binary(max_size=20)),
    st.builds(DropEntry, keys),
    st.builds(TouchEntry, keys, st.just(1.0), st.none(), st.integers(0, 9)),
)


@given(st.lists(changes))
def test_pending_changes_have_the_effect_of_all_changes(made: list[Change]) -> None:
    pending = PendingChanges()
    for change in made:
        pending.add(change)
    assert rows_after(pending.listed()) == rows_after(made)
    assert len(pending) <= 3
    drops = [isinstance(change, DropEntry) for change in pending.listed()]
    assert all(before <= after for before, after in pairwise(drops))


def rows_after(made: list[Change]) -> dict[str, tuple[bytes, int]]:
    rows: dict[str, tuple[bytes, int]] = {}
    for change in made:
        match change:
            case EntryRow():
                rows[change.key] = (change.text, change.hits)
            case DropEntry(key):
                rows.pop(key, None)
            case TouchEntry(key, hits=hits) if key in rows:
                rows[key] = (rows[key][0], hits)
    return rows
