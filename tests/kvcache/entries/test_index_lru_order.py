"""Tests the LRU order of entries, page by page, against a plain list."""

from __future__ import annotations

from itertools import islice

from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.kvcache.entries.entry import Clock, Entry
from rekindle.kvcache.entries.index import EntryIndex
from rekindle.kvcache.entries.retention import EntryLimits, PinnedBlocks, Retention
from rekindle.tokens import Tokens

A, B = b"a", b"b"
CLOCK = Clock()

Action = tuple[str, int]


def entry(number: int) -> Entry:
    namespace = (A, B)[number % 2]
    return Entry(
        namespace,
        Tokens.of([number]),
        key=f"key {number}",
        text=b"",
        text_tokens=1,
        created_at=0.0,
        last_used_at=0.0,
        used_s=0.0,
    )


def pages(index: EntryIndex, namespace: bytes | None, size: int) -> list[Entry]:
    """All entries, read page by page as a client does."""
    found: list[Entry] = []
    before = None
    while page := list(islice(index.newest(namespace, before), size)):
        found += page
        before = page[-1].place
    return found


@settings(max_examples=200, deadline=None)
@given(
    actions=st.lists(st.tuples(st.sampled_from("aaur"), st.integers(0, 400)), max_size=400),
    size=st.integers(1, 7),
)
def test_all_pages_together_are_the_entries_most_recently_used_first(
    actions: list[Action], size: int
) -> None:
    index, order = EntryIndex(Retention(PinnedBlocks((), 8, EntryLimits()))), list[Entry]()
    for number, (action, pick) in enumerate(actions):
        if action == "a" or not order:
            index.add(added := entry(number))
            order.append(added)
            continue
        chosen = order.pop(pick % len(order))
        if action == "r":
            index.remove(chosen)
        else:
            index.use(chosen, CLOCK)
            order.append(chosen)
    for view in (A, B, None):
        expected = [each for each in order if view in (None, each.namespace)]
        assert index.of(view) == expected
        assert pages(index, view, size) == expected[::-1]
    assert len(index) == len(order)


def test_changes_between_two_pages_neither_repeat_nor_hide_other_entries() -> None:
    index = EntryIndex(Retention(PinnedBlocks((), 8, EntryLimits())))
    added = [entry(2 * number) for number in range(6)]
    for each in added:
        index.add(each)
    first = list(islice(index.newest(A, None), 2))
    assert first == [added[5], added[4]]
    cursor = added[4].place
    index.remove(added[4])  # where the page ended
    index.use(added[5], CLOCK)
    index.use(added[0], CLOCK)  # goes to the top, which was read
    index.add(entry(100))
    rest = list(index.newest(A, cursor))
    assert rest == [added[3], added[2], added[1]]


def test_endless_use_takes_no_more_memory() -> None:
    index = EntryIndex(Retention(PinnedBlocks((), 8, EntryLimits())))
    added = [entry(number) for number in range(10)]
    for each in added:
        index.add(each)
    for _ in range(1000):
        for each in added:
            index.use(each, CLOCK)
    assert all(len(order._places) < 300 for order in index._orders.values())
    for each in added:
        index.remove(each)
    assert not index._orders
