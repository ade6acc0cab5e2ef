"""Where is this prefix? A tree of blocks, each under the block before it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass

from rekindle.kvcache.block import Block
from rekindle.kvcache.handles import NO_HEADS, Head, Heads
from rekindle.kvcache.key import TOKEN_BYTES, chain_key, shared_prefix


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

    def root(self, root: bytes) -> Block:
        """The node above the first blocks of a namespace."""
        return self._roots.setdefault(root, Block(root, None, b"", 0, exact=True))

    def is_full(self, block: Block) -> bool:
        """Whether others may follow it; nothing is ever found after a tail."""
        return len(block.packed) == self._block_bytes

    def split(self, packed: bytes) -> list[bytes]:
        """A run of tokens, block by block."""
        size = self._block_bytes
        return [packed[at : at + size] for at in range(0, len(packed), size)]

    def could_hold(self, packed: bytes) -> bool:
        """Whether these are the tokens of a full block or a tail."""
        return 0 < len(packed) <= self._block_bytes and len(packed) % TOKEN_BYTES == 0

    def match(self, root: bytes, packed: bytes) -> Match:
        """Walk full blocks by their tokens; then take what fits of the best child."""
        node = self._roots.get(root)
        if node is None:
            return Match((), 0, diverged=False)
        found: list[Block] = []
        offset = 0
        while len(chunk := packed[offset : offset + self._block_bytes]) == self._block_bytes:
            child = node.children.get(chunk)
            if child is None:
                break
            found.append(child)
            node, offset = child, offset + len(chunk)
        return self._match_part(node, found, chunk, offset // TOKEN_BYTES)

    @staticmethod
    def _match_part(node: Block, found: list[Block], chunk: bytes, tokens: int) -> Match:
        """The child sharing most with the chunk: in sorted order it is a neighbour of it."""
        at = bisect_left(node.order, chunk)
        near = node.order[max(at - 1, 0) : at + 1]
        shared = [shared_prefix(packed, chunk) for packed in near]
        most = max(shared, default=0)
        best = [packed for packed, count in zip(near, shared, strict=True) if count == most]
        cut = most * TOKEN_BYTES
        diverged = len(chunk) > cut and any(len(packed) > cut for packed in best)
        if most:
            found.append(node.children[best[-1]])  # of two that serve, the longer
        return Match(tuple(found), tokens + most, diverged)

    def checkpoints(self, root: bytes, packed: bytes) -> Iterator[Block]:
        """Blocks with a checkpoint from which these tokens go on, the longest prefix first."""
        path = [self._roots[root]] if root in self._roots else []
        for chunk in self.split(packed):
            child = path[-1].children.get(chunk) if path else None
            if child is None or not self.is_full(child):
                break
            path.append(child)
        for node in reversed(path):
            chunk = self._next(node, packed)
            whole = node.children.get(chunk)
            if whole is not None and whole.resumable and not self.is_full(whole):
                yield whole
            yield from (tail for tail in _beginnings(node, chunk) if tail.resumable)
            if node.resumable:
                yield node

    def through(self, node: Block, packed: bytes) -> Block | None:
        """The child that a run of tokens goes through: one with a checkpoint of its end, or of the
        token before, which is where a reply ends; else one that holds all of its next block, or the
        longest tail that this begins with."""
        chunk = self._next(node, packed)
        if node.stop * TOKEN_BYTES + len(chunk) == len(packed):
            for end in (chunk, chunk[:-TOKEN_BYTES]):
                if (tail := node.children.get(end)) and tail.resumable:
                    return tail
        at = bisect_left(node.order, chunk)
        if chunk and at < len(node.order) and node.order[at].startswith(chunk):
            return node.children[node.order[at]]
        while at and chunk:
            nearest = node.order[at - 1]
            if chunk.startswith(nearest):
                return node.children[nearest]
            chunk = chunk[: shared_prefix(nearest, chunk) * TOKEN_BYTES]
            at = bisect_right(node.order, chunk)
        return None

    def place(self, head: Head, node: Block | None = None) -> None:
        """Let a conversation end in the last block, at or below `node`, that holds state of it."""
        node = node or self.root(head.root)
        while child := self.through(node, head.packed):
            node = child
        self._move(head, node)

    def lift(self, head: Head) -> None:
        """Let a conversation end nowhere."""
        self._move(head, None)

    def _move(self, head: Head, node: Block | None) -> None:
        """The one place where a conversation's end changes."""
        before, head.block = head.block, node
        if before is node:
            return
        if before is not None:
            before.heads.remove(head)
            if not before.heads:
                before.heads = NO_HEADS
                self._tidy(before)
        if node is not None:
            if node.heads is NO_HEADS:
                node.heads = Heads()
            node.heads.add(head, self._next(node, head.packed))

    def add(
        self,
        root: bytes,
        parent: Block | None,
        packed: bytes,
        size_bytes: int,
        *,
        exact: bool,
        resumable: bool = False,
    ) -> Block:
        """Put a block under its parent; without one, under the root."""
        above = parent or self.root(root)
        assert packed not in above.children, "one block for the same tokens"
        assert self.could_hold(packed), "a full block or a tail"
        key = chain_key(above.key, packed)
        block = Block(key, above, packed, size_bytes, exact=exact, resumable=resumable)
        above.children[packed] = self._blocks[block.key] = block
        insort(above.order, packed)
        return block

    def remove(self, block: Block) -> None:
        """Take a leaf out; a root left without children goes too."""
        assert not block.children, "leaves go first"
        above = block.parent
        assert above is not None
        if self._blocks.get(block.key) is block:
            del self._blocks[block.key]
        del above.children[block.packed]
        above.order.pop(bisect_left(above.order, block.packed))
        if not block.heads:  # else they are to be placed above it
            self._tidy(above)

    def _tidy(self, root: Block) -> None:
        """Forget a root that nothing depends on."""
        known = root.is_root and self._roots.get(root.key) is root
        if known and not root.children and not root.heads:
            del self._roots[root.key]

    def shorter(self, block: Block) -> list[Block]:
        """Siblings whose tokens are the beginning of this block's: it covers them."""
        above = block.parent
        assert above is not None
        return list(_beginnings(above, block.packed))

    def along(self, node: Block, packed: bytes) -> list[Block]:
        """Children that hold the next of these tokens, more of them or fewer; the longest first."""
        chunk = self._next(node, packed)
        if not chunk:
            return []
        same = [node.children[chunk]] if chunk in node.children else []
        longer = list(self.longer(node.key, chunk))
        return [*reversed(longer), *same, *_beginnings(node, chunk)]

    def _next(self, node: Block, packed: bytes) -> bytes:
        """The tokens that come after a block, a block's worth at most."""
        start = node.stop * TOKEN_BYTES
        return packed[start : start + self._block_bytes]

    def longer(self, parent: bytes, packed: bytes) -> Iterator[Block]:
        """Blocks under this parent, or root, that begin with these tokens and go on."""
        above = self._blocks.get(parent) or self._roots.get(parent)
        if above is None:
            return
        at = bisect_right(above.order, packed)
        while at < len(above.order) and above.order[at].startswith(packed):
            yield above.children[above.order[at]]
            at += 1


def _beginnings(above: Block, packed: bytes) -> Iterator[Block]:
    """Children whose tokens are the beginning of these, but not all of them; the longest first."""
    while at := bisect_left(above.order, packed):
        packed = packed[: shared_prefix(above.order[at - 1], packed) * TOKEN_BYTES]
        if found := above.children.get(packed):
            yield found
