"""Tokens stand for text and pictures when they are compared, hashed and stored."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.tokens import MEDIA_BIT, TokenBuffer, Tokens, common_bytes, common_length

ids = st.lists(st.integers(0, MEDIA_BIT - 1), max_size=40)
DIGEST, OTHER = b"a picture", b"another picture"


@given(ids)
def test_ids_are_returned_unchanged(numbers: list[int]) -> None:
    tokens = Tokens.of(numbers)
    assert tokens.ids() == list(tokens) == numbers
    assert len(tokens) == len(numbers)


@given(ids, st.integers(0, 50), st.integers(0, 50))
def test_a_slice_equals_the_slice_of_the_ids(numbers: list[int], start: int, stop: int) -> None:
    assert Tokens.of(numbers)[start:stop].ids() == numbers[start:stop]


@given(ids, ids)
def test_a_sum_equals_the_sum_of_the_ids(one: list[int], other: list[int]) -> None:
    both = Tokens.of(one) + Tokens.of(other)
    assert both.ids() == one + other
    assert both.startswith(Tokens.of(one))


@given(ids, ids)
def test_the_common_prefix_equals_that_of_the_ids(one: list[int], other: list[int]) -> None:
    expected = common_length(one, other)
    assert Tokens.of(one).common_prefix(Tokens.of(other)) == expected


@given(ids, ids)
def test_tokens_are_equal_if_their_ids_are(one: list[int], other: list[int]) -> None:
    assert (Tokens.of(one) == Tokens.of(other)) == (one == other)
    assert len({Tokens.of(one), Tokens.of(list(one))}) == 1


@given(ids, ids)
def test_a_buffer_grows_like_a_list(first: list[int], more: list[int]) -> None:
    buffer = TokenBuffer(Tokens.of(first))
    for token in more:
        buffer.append(token)
    assert buffer.ids == buffer.all().ids() == first + more
    assert buffer.first(3).ids() == (first + more)[:3]


@given(st.binary(max_size=30), st.binary(max_size=30))
def test_common_bytes_are_counted_up_to_the_first_difference(one: bytes, other: bytes) -> None:
    assert common_bytes(one, other) == common_length(one, other)


def test_a_picture_has_ids_outside_every_vocabulary() -> None:
    assert all(token & MEDIA_BIT for token in Tokens.of_media(DIGEST, 9, 3))


def test_equal_pictures_are_equal_tokens_and_others_are_not() -> None:
    assert Tokens.of_media(DIGEST, 9, 3) == Tokens.of_media(DIGEST, 9, 3)
    assert Tokens.of_media(DIGEST, 9, 3) != Tokens.of_media(OTHER, 9, 3)


def test_a_picture_can_take_fewer_positions_than_tokens() -> None:
    prompt = Tokens.of([1, 2]) + Tokens.of_media(DIGEST, 9, 3) + Tokens.of([4])
    assert len(prompt) == 12
    assert [each.positions for each in prompt.media] == [3]


def test_a_slice_contains_only_whole_pictures() -> None:
    prompt = Tokens.of([1, 2]) + Tokens.of_media(DIGEST, 9, 3) + Tokens.of_media(OTHER, 5, 5)
    [first, second] = prompt.media
    assert (first.start, second.start) == (2, 11)
    assert [each.digest for each in prompt[2:].media] == [DIGEST, OTHER]
    assert [each.start for each in prompt[2:].media] == [0, 9]
    assert prompt[:10].media == ()
    assert prompt[:10].ids() == prompt.ids()[:10]


def test_a_common_prefix_contains_a_picture_completely_or_not_at_all() -> None:
    picture = Tokens.of([1, 2]) + Tokens.of_media(DIGEST, 9, 3)
    cut = Tokens(picture.packed[: 4 * 7])
    assert picture.common_prefix(cut + Tokens.of([5])) == 2
    assert picture.common_prefix(picture + Tokens.of([5])) == 11


def test_a_picture_with_too_few_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="at least"):
        Tokens.of_media(DIGEST, 3, 3)


def test_a_buffer_keeps_its_initial_pictures() -> None:
    buffer = TokenBuffer(Tokens.of([1]) + Tokens.of_media(DIGEST, 4, 4))
    buffer.append(7)
    assert [each.digest for each in buffer.all().media] == [DIGEST]
    assert buffer.first(3).media == ()


def test_buffers_compare_like_tokens() -> None:
    picture = Tokens.of([1, 2]) + Tokens.of_media(DIGEST, 9, 3)
    cut = TokenBuffer(Tokens(picture.packed[: 4 * 7]))
    assert TokenBuffer(picture).common_prefix(cut) == cut.common_prefix(TokenBuffer(picture)) == 2
    assert TokenBuffer(picture).common_prefix(TokenBuffer(picture)) == 11
