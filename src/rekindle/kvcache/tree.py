"""The tree that finds stored prefixes: each block is under the block before it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from rekindle.kvcache.block import (
    NO_HANDLES,
    Block,
    BlockKind,
    Handles,
    PrefixHandle,
    below,
    chain_key,
    more_bytes,
)
from rekindle.tokens import TOKEN_BYTES, Tokens, common_prefix


@dataclass(frozen=True, slots=True)
class Match:
    """The longest stored prefix of some tokens: whole blocks, then part of one more."""

    blocks: tuple[Block, ...]
    tokens: int  # matched in all, the part of the last block included
    diverged: bool  # the store goes on where the request goes another way


class Tree:
    """Finds blocks by the tokens they hold; decides nothing about lifetimes."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._block_bytes = block_tokens * TOKEN_BYTES
        self._roots: dict[bytes, Block] = {}
        self._blocks: dict[bytes, Block] = {}
        #: Of all state, each block once, by tenant; None: of all of them.
        self.size_bytes: Counter[bytes | None] = Counter()

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks.values())

    def get(self, key: bytes) -> Block | None:
        return self._blocks.get(key)

    def root(self, namespace: bytes, tenant: bytes | None = None) -> Block:
        """The node above the first blocks of a namespace, which is a tenant's for good."""
        root = self._roots.get(namespace)
        if root is None:
            root = Block(namespace, None, Tokens(), 0, exact=True, tenant=tenant)
            self._roots[namespace] = root
        return root

    def is_full(self, block: Block) -> bool:
        """Whether others may follow it; nothing is ever found after a tail."""
        return len(block.tokens.packed) == self._block_bytes

    def could_hold(self, tokens: Tokens) -> bool:
        """Whether these are the tokens of a full block or a tail."""
        size = len(tokens.packed)
        return 0 < size <= self._block_bytes and size % TOKEN_BYTES == 0

    def match(self, namespace: bytes, tokens: Tokens) -> Match:
        """Walk full blocks by their tokens; then take what fits of the best child."""
        node = self._roots.get(namespace)
        if node is None:
            return Match((), 0, diverged=False)
        packed = tokens.packed
        found: list[Block] = []
        offset = 0
        while len(chunk := packed[offset : offset + self._block_bytes]) == self._block_bytes:
            child = node.children.get(chunk)
            if child is None:
                break
            found.append(child)
            node, offset = child, offset + len(chunk)
        match = _match_part(node, found, chunk, offset // TOKEN_BYTES)
        return _with_whole_media(match, tokens) if tokens.media else match

    def checkpoints(self, namespace: bytes, tokens: Tokens) -> Iterator[Block]:
        """Blocks with a checkpoint from which these tokens go on, the longest prefix first; none in
        the middle of a picture."""
        packed = tokens.packed
        path = [self._roots[namespace]] if namespace in self._roots else []
        while path:
            child = path[-1].children.get(self._next(path[-1], packed))
            if child is None or not self.is_full(child):
                break
            path.append(child)
        for node in reversed(path):
            chunk = self._next(node, packed)
            whole = node.children.get(chunk)
            tail = [whole] if whole is not None and not self.is_full(whole) else []
            for block in chain(tail, _beginnings(node, chunk), [node]):
                if block.resumable and tokens.whole_media(block.stop) == block.stop:
                    yield block

    def place(self, handle: PrefixHandle, node: Block | None = None) -> None:
        """Let a conversation end in the last block, at or below `node`, that holds state of it."""
        node = node or self.root(handle.namespace, handle.tenant)
        packed = handle.tokens.packed
        offset = node.stop * TOKEN_BYTES
        while offset + self._block_bytes < len(packed):  # what ends here may end in a tail
            child = node.children.get(packed[offset : offset + self._block_bytes])
            if child is None:
                break
            node, offset = child, offset + self._block_bytes
        while child := _through(node, self._next(node, packed), packed):
            node = child
        self._move(handle, node)

    def lift(self, handle: PrefixHandle) -> None:
        """Let a conversation end nowhere."""
        self._move(handle, None)

    def _move(self, handle: PrefixHandle, node: Block | None) -> None:
        """The one place where a conversation's end changes."""
        before, handle.block = handle.block, node
        if before is node:
            return
        handle.state_bytes += more_bytes(node, before)
        if before is not None:
            before.handles.remove(handle)
            if not before.handles:
                before.handles = NO_HANDLES
                self._tidy(before)
        if node is not None:
            if node.handles is NO_HANDLES:
                node.handles = Handles()
            node.handles.add(handle, self._next(node, handle.tokens.packed))

    def add(
        self,
        namespace: bytes,
        parent: Block | None,
        tokens: Tokens,
        size_bytes: int,
        *,
        exact: bool,
        resumable: bool = False,
        key: bytes | None = None,
        tenant: bytes | None = None,
    ) -> Block:
        """Put a block under its parent; without one, under the root. `key` is its chain key, where
        that is known."""
        above = parent or self.root(namespace, tenant)
        packed = tokens.packed
        assert packed not in above.children, "one block for the same tokens"
        assert self.could_hold(tokens), "a full block or a tail"
        block = Block(
            key or chain_key(above.key, tokens),
            above,
            tokens,
            size_bytes,
            exact=exact,
            resumable=resumable,
        )
        above.children[packed] = self._blocks[block.key] = block
        insort(above.order, packed)
        self._count(block, size_bytes)
        return block

    def set_kind(self, block: Block, kind: BlockKind) -> None:
        """Let a block be of another kind from now on."""
        grown_bytes = kind.size_bytes - block.size_bytes
        block.kind = kind
        if grown_bytes:  # by a checkpoint, which is seldom added to a block with others below it
            self._count(block, grown_bytes)
            for handle in (handle for each in below(block) for handle in each.handles):
                handle.state_bytes += grown_bytes

    def _count(self, block: Block, more_bytes: int) -> None:
        self.size_bytes[None] += more_bytes
        held_bytes = self.size_bytes[block.tenant] + more_bytes
        self.size_bytes[block.tenant] = held_bytes
        if not held_bytes:
            del self.size_bytes[block.tenant]

    def remove(self, block: Block) -> None:
        """Take a leaf out; a root left without children goes too."""
        assert not block.children, "leaves go first"
        above = block.parent
        assert above is not None
        if self._blocks.get(block.key) is block:
            del self._blocks[block.key]
            self._count(block, -block.size_bytes)
        del above.children[block.tokens.packed]
        above.order.pop(bisect_left(above.order, block.tokens.packed))
        if not block.handles:  # else they are to be placed above it
            self._tidy(above)

    def _tidy(self, root: Block) -> None:
        """Forget a root that nothing depends on."""
        known = root.is_root and self._roots.get(root.key) is root
        if known and not root.children and not root.handles:
            del self._roots[root.key]

    def along(self, node: Block, tokens: Tokens) -> list[Block]:
        """Children that hold the next of these tokens, more of them or fewer; the longest first."""
        chunk = self._next(node, tokens.packed)
        if not chunk:
            return []
        same = [node.children[chunk]] if chunk in node.children else []
        longer = list(_longer(node, chunk))
        return [*reversed(longer), *same, *_beginnings(node, chunk)]

    def _next(self, node: Block, packed: bytes) -> bytes:
        """The tokens that come after a block, a block's worth at most."""
        start = node.stop * TOKEN_BYTES
        return packed[start : start + self._block_bytes]

    def longer(self, parent: bytes, tokens: Tokens) -> Iterator[Block]:
        """Blocks under this parent, or root, that begin with these tokens and go on."""
        above = self._blocks.get(parent) or self._roots.get(parent)
        return _longer(above, tokens.packed) if above is not None else iter(())


def _match_part(node: Block, found: list[Block], chunk: bytes, tokens: int) -> Match:
    """The child sharing most with the chunk: in sorted order it is a neighbour of it."""
    at = bisect_left(node.order, chunk)
    near = node.order[max(at - 1, 0) : at + 1]
    shared = [common_prefix(packed, chunk) for packed in near]
    most = max(shared, default=0)
    best = [packed for packed, count in zip(near, shared, strict=True) if count == most]
    cut = most * TOKEN_BYTES
    diverged = len(chunk) > cut and any(len(packed) > cut for packed in best)
    if most:
        found.append(node.children[best[-1]])  # of two that serve, the longer
    return Match(tuple(found), tokens + most, diverged)


def _through(node: Block, chunk: bytes, packed: bytes) -> Block | None:
    """The child that a run of tokens goes through, of which `chunk` is after the node: one with a
    checkpoint of its end, or of the token before, which is where a reply ends; else one that holds
    all of its next block, or the longest tail that this begins with."""
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
        chunk = chunk[: common_prefix(nearest, chunk) * TOKEN_BYTES]
        at = bisect_right(node.order, chunk)
    return None


def _with_whole_media(match: Match, tokens: Tokens) -> Match:
    """The match up to the picture that it would cut: state in the middle of one is of no use."""
    most = tokens.whole_media(match.tokens)
    if most == match.tokens:
        return match
    blocks = tuple(block for block in match.blocks if block.start < most)
    return Match(blocks, most, match.diverged)


def shorter(block: Block) -> list[Block]:
    """Siblings whose tokens are the beginning of this block's: it covers them."""
    above = block.parent
    assert above is not None
    return list(_beginnings(above, block.tokens.packed))


def _longer(above: Block, packed: bytes) -> Iterator[Block]:
    at = bisect_right(above.order, packed)
    while at < len(above.order) and above.order[at].startswith(packed):
        yield above.children[above.order[at]]
        at += 1


def _beginnings(above: Block, packed: bytes) -> Iterator[Block]:
    """Children whose tokens are the beginning of these, but not all of them; the longest first."""
    while at := bisect_left(above.order, packed):
        packed = packed[: common_prefix(above.order[at - 1], packed) * TOKEN_BYTES]
        if found := above.children.get(packed):
            yield found
