"""Where is this prefix? A tree of blocks, each under the block before it."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

from rekindle.cache.key import TOKEN_BYTES, chain_key, shared_prefix


class Block:
    """A node of the tree. `exact` says it was computed in canonical prefill steps."""

    __slots__ = ("children", "exact", "key", "order", "packed", "parent", "size_bytes", "start")

    def __init__(
        self, key: bytes, parent: Block | None, packed: bytes, size_bytes: int, *, exact: bool
    ) -> None:
        self.key = key
        self.parent = parent
        self.packed = packed
        self.size_bytes = size_bytes
        self.exact = exact
        self.start: int = parent.stop if parent else 0
        self.children: dict[bytes, Block] = {}
        self.order: list[bytes] = []  # the children's packed tokens, sorted

    @property
    def tokens(self) -> int:
        return len(self.packed) // TOKEN_BYTES

    @property
    def stop(self) -> int:
        return self.start + self.tokens

    @property
    def is_root(self) -> bool:
        return self.parent is None


@dataclass(frozen=True, slots=True)
class Match:
    """The longest stored prefix of some tokens: whole blocks, then part of one more."""

    blocks: tuple[Block, ...]
    tokens: int  # matched in all, the part of the last block included
    diverged: bool  # the store goes on where the request goes another way


class Index:
    """Finds blocks by the tokens they hold; decides nothing about lifetimes."""

    def __init__(self, block_tokens: int) -> None:
        self._block_bytes = block_tokens * TOKEN_BYTES
        self._roots: dict[bytes, Block] = {}
        self._blocks: dict[bytes, Block] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks.values())

    def get(self, key: bytes) -> Block | None:
        return self._blocks.get(key)

    def match(self, root: bytes, packed: bytes) -> Match:
        """Walk full blocks by key, comparing tokens; then take what fits of the best child."""
        node = self._roots.get(root)
        if node is None:
            return Match((), 0, diverged=False)
        found: list[Block] = []
        offset = 0
        while len(chunk := packed[offset : offset + self._block_bytes]) == self._block_bytes:
            child = node.children.get(chain_key(node.key, chunk))
            if child is None or child.packed != chunk:  # a key is a hint, tokens decide
                break
            found.append(child)
            node, offset = child, offset + len(chunk)
        return self._match_part(node, found, chunk, offset // TOKEN_BYTES)

    def _match_part(self, node: Block, found: list[Block], chunk: bytes, tokens: int) -> Match:
        child, shared = self._closest(node, chunk)
        if child is None or not shared:
            return Match(tuple(found), tokens, diverged=bool(chunk and node.children))
        diverged = shared < min(child.tokens, len(chunk) // TOKEN_BYTES)
        return Match((*found, child), tokens + shared, diverged)

    @staticmethod
    def _closest(node: Block, chunk: bytes) -> tuple[Block | None, int]:
        """The child sharing most with the chunk: in sorted order it is a neighbour of it."""
        at = bisect_left(node.order, chunk)
        best: tuple[Block | None, int] = (None, 0)
        for packed in node.order[max(at - 1, 0) : at + 1]:
            shared = shared_prefix(packed, chunk)
            if shared > best[1]:
                best = (node.children[chain_key(node.key, packed)], shared)
        return best

    def add(
        self, root: bytes, parent: Block | None, packed: bytes, size_bytes: int, *, exact: bool
    ) -> Block:
        """Put a block under its parent; without one, under the root."""
        above = parent or self._roots.setdefault(root, Block(root, None, b"", 0, exact=True))
        block = Block(chain_key(above.key, packed), above, packed, size_bytes, exact=exact)
        above.children[block.key] = self._blocks[block.key] = block
        insort(above.order, packed)
        return block

    def remove(self, block: Block) -> None:
        """Take a leaf out; a root left without children goes too."""
        assert not block.children, "leaves go first"
        above = block.parent
        assert above is not None
        del self._blocks[block.key], above.children[block.key]
        above.order.pop(bisect_left(above.order, block.packed))
        if above.is_root and not above.children:
            del self._roots[above.key]

    def shorter(self, block: Block) -> list[Block]:
        """Siblings whose tokens are the beginning of this block's: it covers them."""
        above = block.parent
        assert above is not None
        at = bisect_left(above.order, block.packed)
        covered = []
        while at and block.packed.startswith(above.order[at - 1]):
            covered.append(above.children[chain_key(above.key, above.order[at - 1])])
            at -= 1
        return covered
