from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rekindle.kvcache.entry_index import TextIndex
from rekindle.tokens import common_bytes

#: Few letters, so that texts begin with each other all the time; marks are bytes like any other.
texts = st.lists(st.sampled_from(b"ab\xff"), max_size=6).map(bytes)


@given(st.lists(texts, max_size=30), texts)
def test_the_longest_stored_beginning_is_found(stored: list[bytes], request: bytes) -> None:
    remembered: TextIndex[bytes] = TextIndex()
    for text in stored:
        remembered.put(text, text)
    expected = max((t for t in stored if request.startswith(t)), key=len, default=None)
    assert remembered.longest(request) == expected
    assert len(remembered) == len(set(stored))


@given(st.lists(st.tuples(texts, st.booleans()), max_size=30), texts)
def test_what_was_dropped_is_not_found_and_the_rest_is(
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


def test_of_two_equal_texts_the_later_stays_though_the_earlier_is_dropped() -> None:
    remembered: TextIndex[list[int]] = TextIndex()
    first, second = [1], [2]
    remembered.put(b"text", first)
    remembered.put(b"text", second)
    remembered.drop(b"text", first)
    assert remembered.longest(b"text and more") is second


@given(st.lists(texts, max_size=30), texts)
def test_the_nearest_text_has_as_much_in_common_as_any(stored: list[bytes], request: bytes) -> None:
    remembered: TextIndex[bytes] = TextIndex()
    for text in stored:
        remembered.put(text, text)
    found = remembered.nearest(request)
    most = max((common_bytes(text, request) for text in stored), default=None)
    assert (None if found is None else common_bytes(found, request)) == most
