"""Tests the search for the longest stored prefix against a naive one, and its cost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.kvcache.entries import index as text_index
from rekindle.kvcache.entries.index import TextIndex
from rekindle.tokens import common_bytes
from tests.support.effort import calls_made

#: Few letters, so that texts begin with each other all the time; marks are bytes like any other.
texts = st.lists(st.sampled_from(b"ab\xff"), max_size=6).map(bytes)


@given(st.lists(texts, max_size=30), texts)
def test_the_longest_stored_prefix_is_found(stored: list[bytes], request: bytes) -> None:
    remembered: TextIndex[bytes] = TextIndex()
    for text in stored:
        remembered.put(text, text)
    expected = max((t for t in stored if request.startswith(t)), key=len, default=None)
    assert remembered.longest(request) == expected
    assert len(remembered) == len(set(stored))


@given(st.lists(st.tuples(texts, st.booleans()), max_size=30), texts)
def test_a_dropped_text_is_not_found_and_the_others_are(
    steps: list[tuple[bytes, bool]], request: bytes
) -> None:
    remembered: TextIndex[bytes] = TextIndex()
    kept: dict[bytes, bytes] = {}
    for text, keep in steps:
        if keep:
            remembered.put(text, text)
            kept[text] = text
        else:
            remembered.drop(text, kept.pop(text, text))
    expected = max((t for t in kept if request.startswith(t)), key=len, default=None)
    assert remembered.longest(request) == expected
    assert len(remembered) == len(kept)
    for text, value in kept.items():
        remembered.drop(text, value)
    assert nodes(remembered) == 1


def nodes(index: TextIndex[bytes]) -> int:
    found = [index._root]
    for node in found:  # grows as it is walked
        found.extend(node.children.values())
        is_needed = node.value is not None or len(node.children) > 1
        assert is_needed or node is index._root, "neither a text nor a branch"
    return len(found)


def test_dropping_the_earlier_of_two_equal_texts_keeps_the_later() -> None:
    remembered: TextIndex[list[int]] = TextIndex()
    first, second = [1], [2]
    remembered.put(b"text", first)
    remembered.put(b"text", second)
    remembered.drop(b"text", first)
    assert remembered.longest(b"text and more") is second


@given(st.lists(texts, max_size=30), texts)
def test_the_nearest_text_has_the_longest_common_prefix(
    stored: list[bytes], request: bytes
) -> None:
    remembered: TextIndex[bytes] = TextIndex()
    for text in stored:
        remembered.put(text, text)
    found = remembered.nearest(request)
    most = max((common_bytes(text, request) for text in stored), default=None)
    assert (None if found is None else common_bytes(found, request)) == most


def read_bytes(search: Callable[[bytes], object], text: bytes, patch: pytest.MonkeyPatch) -> int:
    """Counts the bytes of a text that a search compares."""
    read = 0

    def counting(text: bytes, at: int, edge: bytes) -> bool:
        nonlocal read
        read += len(edge)
        return text.startswith(edge, at)

    with patch.context() as patched:
        patched.setattr(text_index, "_has_edge", counting)
        search(text)
    return read


STEPS = 2000
#: For each, what is stored at every step, and a text that goes through all of them.
ADVERSARIES = {
    "branches below": [b"a" * step + b"A" for step in range(1, STEPS)],
    "branches above": [b"a" * step + b"z" for step in range(1, STEPS)],
    "nested": [b"a" * step for step in range(1, STEPS)],
    "long branches": [b"a" * step + b"A" * STEPS for step in range(1, STEPS, 10)],
}


@pytest.mark.parametrize("kind", ADVERSARIES)
@pytest.mark.parametrize("text", [b"a" * STEPS, b"a" * STEPS + b"B" * STEPS, b"ab", b"b"])
def test_a_search_reads_each_byte_of_its_text_once(
    kind: str, text: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    index: TextIndex[int] = TextIndex()
    for stored in ADVERSARIES[kind]:
        index.put(stored, len(stored))
    longest_edge = STEPS  # of which the last one may be read in vain
    for search in (index.longest, index.nearest):
        assert read_bytes(search, text, monkeypatch) <= len(text) + longest_edge
    known = [stored for stored in ADVERSARIES[kind] if text.startswith(stored)]
    assert index.longest(text) == max(map(len, known), default=None)


@pytest.mark.parametrize("count", [10, 10_000])
def test_the_steps_of_a_search_do_not_grow_with_the_number_of_texts(count: int) -> None:
    index: TextIndex[int] = TextIndex()
    for number in range(count):
        index.put(b"you are helpful" + number.to_bytes(4, "big"), number)
    assert calls_made(lambda: index.longest(b"you are helpful, and brief")) < 60
