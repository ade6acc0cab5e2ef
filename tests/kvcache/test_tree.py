from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.kvcache.block import BlockKind, chain_key
from rekindle.kvcache.tree import Match, Tree, shorter
from rekindle.tokens import Tokens

from .naive import (
    ROOT,
    STRANGER,
    Ids,
    PathTree,
    block_sizes,
    common,
    few_names,
    goes_another_way,
    longest,
    runs,
)

many_runs = st.lists(runs, max_size=8)


def grown(stored: list[Ids], block_tokens: int) -> PathTree:
    paths = PathTree(block_tokens)
    for run in stored:
        paths.add(run)
    return paths


def check_match(paths: PathTree, request: Ids) -> None:
    """The match is the longest prefix, in consecutive blocks from the start."""
    match = paths.tree.match(ROOT, Tokens.of(request))
    assert match.tokens == longest(paths.blocks, request)
    assert match.diverged == goes_another_way(paths.blocks, request)
    stop = 0
    for block in match.blocks:
        assert block.start == stop < match.tokens
        assert block in paths.blocks.values()
        stop = block.stop
    held = [token for block in match.blocks for token in block.tokens]
    assert held[: match.tokens] == list(request[: match.tokens])
    assert stop >= match.tokens


@given(many_runs, block_sizes, runs)
def test_the_longest_common_prefix_is_found(
    stored: list[Ids], block_tokens: int, request: Ids
) -> None:
    check_match(grown(stored, block_tokens), request)


@given(many_runs, block_sizes, runs, st.data())
def test_the_longest_common_prefix_is_found_after_leaves_were_removed(
    stored: list[Ids], block_tokens: int, request: Ids, data: st.DataObject
) -> None:
    paths = grown(stored, block_tokens)
    for _ in range(data.draw(st.integers(0, len(paths.blocks)))):
        paths.remove(data.draw(st.sampled_from(paths.leaves())))
    check_match(paths, request)
    assert set(paths.tree) == set(paths.blocks.values())
    assert len(paths.tree) == len(paths.blocks)


@pytest.mark.parametrize(
    ("request_tokens", "tokens", "diverged"),
    [
        ((), 0, False),
        ((1, 2), 2, False),  # the request ends in mid-block
        ((1, 2, 3, 4), 4, False),  # at the end of a block
        ((1, 2, 3, 4, 5), 5, False),  # within the tail
        ((1, 2, 3, 4, 5, 6), 6, False),  # with the tail
        ((1, 2, 3, 4, 5, 6, 7), 6, False),  # the store ends, the request goes on
        ((1, 2, 9), 2, True),
        ((1, 2, 3, 4, 9), 4, True),
        ((1, 2, 3, 4, 5, 9, 9, 9, 9), 5, True),
        ((9,), 0, True),
    ],
)
def test_a_match_diverges_if_store_and_request_both_continue(
    request_tokens: Ids, tokens: int, diverged: bool
) -> None:
    match = grown([(1, 2, 3, 4, 5, 6)], 4).tree.match(ROOT, Tokens.of(request_tokens))
    assert (match.tokens, match.diverged) == (tokens, diverged)


def test_a_short_tail_does_not_hide_a_longer_one_that_diverges() -> None:
    paths = grown([(1, 2), (1, 2, 3)], 4)
    assert paths.tree.match(ROOT, Tokens.of([1, 2, 0])).diverged
    assert paths.tree.match(ROOT, Tokens.of([1, 2, 9])).diverged


@given(many_runs, block_sizes, runs)
def test_nothing_is_found_under_another_root(
    stored: list[Ids], block_tokens: int, request: Ids
) -> None:
    tree = grown(stored, block_tokens).tree
    assert tree.match(STRANGER, Tokens.of(request)) == Match((), 0, diverged=False)


@given(many_runs, block_sizes)
def test_a_match_changes_nothing(stored: list[Ids], block_tokens: int) -> None:
    paths = grown(stored, block_tokens)
    before = list(paths.tree)
    first = [paths.tree.match(ROOT, Tokens.of(run)) for run in stored]
    assert first == [paths.tree.match(ROOT, Tokens.of(run)) for run in stored]
    assert list(paths.tree) == before


@given(many_runs, block_sizes)
def test_a_block_is_named_by_the_chain_above_it(stored: list[Ids], block_tokens: int) -> None:
    paths = grown(stored, block_tokens)
    for block in paths.tree:
        assert block.parent is not None
        assert block.key == chain_key(block.parent.key, block.tokens)
        assert paths.tree.get(block.key) is block


@given(many_runs, block_sizes)
def test_siblings_with_a_common_prefix_are_found(stored: list[Ids], block_tokens: int) -> None:
    paths = grown(stored, block_tokens)
    for block in paths.tree:
        assert block.parent is not None
        siblings = [each for each in block.parent.children.values() if each is not block]
        covered = {each for each in siblings if block.tokens.startswith(each.tokens)}
        longer = {each for each in siblings if each.tokens.startswith(block.tokens)}
        assert set(shorter(block)) == covered
        assert set(paths.tree.longer(block.parent.key, block.tokens)) == longer


@given(many_runs, block_sizes, runs)
def test_blocks_that_cover_a_missing_tail_are_found(
    stored: list[Ids], block_tokens: int, tail: Ids
) -> None:
    paths = grown(stored, block_tokens)
    covering = {path for path in paths.blocks if tail == path[: len(tail)] != path}
    wanted = {paths.blocks[path] for path in covering if len(path) <= block_tokens}
    assert set(paths.tree.longer(ROOT, Tokens.of(tail))) == wanted


@given(many_runs, block_sizes, st.lists(runs, max_size=3), st.sampled_from([1, 3, 8]), st.data())
def test_colliding_keys_never_give_wrong_tokens(
    stored: list[Ids],
    block_tokens: int,
    requests: list[Ids],
    names: int,
    data: st.DataObject,
) -> None:
    with few_names(names):
        paths = grown(stored, block_tokens)
        for request in (*requests, *stored):
            check_match(paths, request)
        for block in paths.blocks.values():
            for covered in shorter(block):
                assert common(covered.tokens.ids(), block.tokens.ids()) == len(covered.tokens)
        while paths.blocks:
            paths.remove(data.draw(st.sampled_from(paths.leaves())))
            for request in requests:
                check_match(paths, request)
        assert len(paths.tree) == 0


def test_a_root_without_blocks_is_removed() -> None:
    paths = grown([(1, 2), (3,)], 4)
    for path in paths.leaves():
        paths.remove(path)
    assert not paths.tree.match(ROOT, Tokens.of([7])).diverged
    assert list(paths.tree.longer(ROOT, Tokens())) == []


def test_only_leaves_can_be_removed() -> None:
    paths = grown([(1, 2, 3)], 2)
    with pytest.raises(AssertionError, match="only leaves"):
        paths.remove((1, 2))


def test_a_match_never_ends_inside_an_image() -> None:
    """A cancelled prefill may leave state in the middle of an image, which cannot be used."""
    picture = Tokens.of_media(b"a picture", 6, 6)
    prompt = Tokens.of([1, 2, 3]) + picture + Tokens.of([4])
    tree = Tree(4)
    first = tree.add(ROOT, None, prompt[:4], BlockKind(1, exact=False))
    second = tree.add(ROOT, first, prompt[4:8], BlockKind(1, exact=False, resumable=True))
    assert tree.match(ROOT, prompt) == Match((first,), 3, diverged=False)
    assert list(tree.checkpoints(ROOT, prompt)) == []
    last = tree.add(ROOT, second, prompt[8:], BlockKind(1, exact=False, resumable=True))
    assert tree.match(ROOT, prompt) == Match((first, second, last), 10, diverged=False)
    assert list(tree.checkpoints(ROOT, prompt)) == [last]


def test_another_image_at_the_same_position_is_another_prefix() -> None:
    tree = Tree(4)
    for digest in (b"a picture", b"another one"):
        prompt = Tokens.of([1, 2]) + Tokens.of_media(digest, 4, 4)
        assert tree.match(ROOT, prompt).tokens in (0, 2)
        first = tree.add(ROOT, None, prompt[:4], BlockKind(1, exact=False))
        tree.add(ROOT, first, prompt[4:], BlockKind(1, exact=False))
        assert tree.match(ROOT, prompt).tokens == 6
