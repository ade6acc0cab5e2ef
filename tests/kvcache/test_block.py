from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.kvcache.block import KEY_BYTES, chain_key, namespace
from rekindle.tokens import TokenBuffer, Tokens, common_prefix, pack

from .naive import common

tokens = st.lists(st.integers(0, 2**32 - 1))
few_tokens = st.lists(st.integers(0, 2))
parts = st.tuples(st.binary(max_size=3), st.binary(max_size=3), st.integers(1, 2))


@given(st.binary(), st.data())
def test_moving_bytes_from_one_part_to_the_next_changes_the_key(
    text: bytes, data: st.DataObject
) -> None:
    one, other = (data.draw(st.integers(0, len(text))) for _ in range(2))
    keys = [
        (namespace(text[:cut], text[cut:], 64), chain_key(text[:cut], Tokens(text[cut:])))
        for cut in (one, other)
    ]
    assert (keys[0][0] == keys[1][0]) == (one == other)
    assert (keys[0][1] == keys[1][1]) == (one == other)


def test_tenants_whose_names_join_to_the_same_text_have_different_namespaces() -> None:
    assert namespace(b"org_1", b"2345", 64) != namespace(b"org_12345", b"", 64)


@given(parts, parts)
def test_namespaces_are_equal_only_for_equal_parts(
    one: tuple[bytes, bytes, int], other: tuple[bytes, bytes, int]
) -> None:
    assert (namespace(*one) == namespace(*other)) == (one == other)


@given(st.binary(max_size=3), st.binary(max_size=3), st.integers(0, 2))
def test_a_namespace_is_never_a_block_key(one: bytes, other: bytes, block_tokens: int) -> None:
    root = namespace(one, other, block_tokens)
    assert root != chain_key(one, Tokens(other))
    assert len(root) == len(chain_key(root, Tokens())) == KEY_BYTES


@given(st.lists(few_tokens, min_size=1), st.data())
def test_a_chain_key_depends_on_everything_before_it(
    blocks: list[list[int]], data: st.DataObject
) -> None:
    def name(root: bytes, chain: list[list[int]]) -> bytes:
        for block in chain:
            root = chain_key(root, Tokens.of(block))
        return root

    at = data.draw(st.integers(0, len(blocks) - 1))
    other = data.draw(few_tokens)
    changed = [*blocks[:at], other, *blocks[at + 1 :]]
    assert (name(b"root", changed) == name(b"root", blocks)) == (changed == blocks)
    assert name(b"toor", blocks) != name(b"root", blocks)
    assert name(b"root", blocks[:-1]) != name(b"root", blocks)


@given(tokens)
def test_packed_tokens_come_back(run: list[int]) -> None:
    assert Tokens.of(run).ids() == run


@given(tokens | few_tokens, tokens | few_tokens)
def test_packed_runs_sort_like_their_tokens(one: list[int], other: list[int]) -> None:
    assert (pack(one) < pack(other)) == (one < other)


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_number_that_is_not_a_token_is_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        Tokens.of([token])


@given(few_tokens, few_tokens, few_tokens)
def test_a_shared_prefix_is_counted_token_by_token(
    start: list[int], one: list[int], other: list[int]
) -> None:
    left, right = start + one, start + other
    assert common_prefix(pack(left), bytearray(pack(right))) == common(left, right)


@given(tokens, tokens)
def test_tokens_that_share_only_some_bytes_are_not_shared(one: list[int], other: list[int]) -> None:
    assert Tokens.of(one).common_prefix(Tokens.of(other)) == common(one, other)


def test_tokens_can_be_appended_after_a_comparison() -> None:
    growing, other = TokenBuffer(Tokens.of([1, 2])), TokenBuffer(Tokens.of([1, 2, 3]))
    assert growing.common_prefix(other) == 2
    growing.append(3)
    assert growing.common_prefix(other) == 3


def test_keys_are_the_same_as_in_earlier_versions() -> None:
    """Files are named by their keys, so a changed key would lose the cache."""
    key = chain_key(b"p" * KEY_BYTES, Tokens.of(range(64)))
    assert key.hex() == "c989996303914045c9e63156668ecc3d7274ab7891e460c1732686edb87e17f2"
    root = namespace(b"weights", b"tenant", 64, b"secret")
    assert root.hex() == "7e35487d2908f81be9ff580db408c47b918bb8554bae445b48489bec33510557"
