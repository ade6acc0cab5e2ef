"""Computes the expected answers of the cache in a slow and obvious way."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import pytest
from hypothesis import strategies as st

from rekindle.kvcache import block as blocks
from rekindle.kvcache import store, tree
from rekindle.kvcache import store as conversations
from rekindle.kvcache.block import Block, BlockKind
from rekindle.kvcache.tree import Tree
from rekindle.tokens import Tokens

Ids = tuple[int, ...]

ROOT = b"r" * 32
STRANGER = b"s" * 32

#: Few tokens and short runs, so that they meet, branch and end everywhere.
runs = st.lists(st.integers(0, 2), max_size=11).map(tuple)
block_sizes = st.integers(1, 4)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of equal leading tokens."""
    for count, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return count
    return min(len(one), len(other))


def ends(tokens: Ids, block_tokens: int) -> list[Ids]:
    """The prefixes of a run that end with each of its blocks."""
    stops = [*range(block_tokens, len(tokens), block_tokens), len(tokens)]
    return [tokens[:stop] for stop in stops if stop]


def last_block(path: Ids, block_tokens: int) -> Ids:
    return path[(len(path) - 1) // block_tokens * block_tokens :]


def parent_of(path: Ids, block_tokens: int) -> Ids:
    return path[: len(path) - len(last_block(path, block_tokens))]


def longest(paths: Collection[Ids], request: Ids) -> int:
    """The longest common prefix of the request with any stored run."""
    return max((common(path, request) for path in paths), default=0)


def goes_another_way(paths: Collection[Ids], request: Ids) -> bool:
    """Whether a stored run diverges from the request at the end of the longest match."""
    most = longest(paths, request)
    return len(request) > most and any(
        len(path) > most and common(path, request) == most for path in paths
    )


class PathTree:
    """A tree and the paths of the blocks in it."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.tree = Tree(block_tokens)
        self.blocks: dict[Ids, Block] = {}

    def add(self, tokens: Ids, exact: Callable[[Ids], bool] = lambda _path: False) -> None:
        for path in ends(tokens, self.block_tokens):
            if path not in self.blocks:
                above = self.blocks.get(parent_of(path, self.block_tokens))
                tokens_of = Tokens.of(last_block(path, self.block_tokens))
                block = self.tree.add(ROOT, above, tokens_of, BlockKind(1, exact=exact(path)))
                self.blocks[path] = block

    def leaves(self) -> list[Ids]:
        parents = {parent_of(path, self.block_tokens) for path in self.blocks}
        return sorted(path for path in self.blocks if path not in parents)

    def remove(self, path: Ids) -> None:
        self.tree.remove(self.blocks.pop(path))


@contextmanager
def few_names(names: int) -> Iterator[None]:
    """Limit the number of different keys. With one, all blocks collide."""
    real = blocks.chain_key

    def stub(parent: bytes, tokens: Tokens) -> bytes:
        return bytes([real(parent, tokens)[0] % names])

    with pytest.MonkeyPatch.context() as patch:
        for module in (blocks, tree, store, conversations):
            patch.setattr(module, "chain_key", stub)
        yield
