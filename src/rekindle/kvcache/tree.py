"""Finds stored prefixes in a tree where each block is under the block before it."""

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
    chain_key,
    difference,
    subtree,
)
from rekindle.tokens import TOKEN_BYTES, Tokens, common_prefix


@dataclass(frozen=True, slots=True)
class Match:
    """The longest stored prefix of some tokens: whole blocks, and perhaps a part of one more."""

    blocks: tuple[Block, ...]
    tokens: int  # including the matched part of the last block
    diverged: bool  # a stored block continues with other tokens than the request


class Tree:
    """Finds blocks by their tokens. It decides nothing about lifetimes."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._block_bytes = block_tokens * TOKEN_BYTES
        self._roots: dict[bytes, Block] = {}
        self._blocks: dict[bytes, Block] = {}
        #: State by tenant, each block counted once. None stands for all tenants.
        self.size_bytes: Counter[bytes | None] = Counter()

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks.values())

    def get(self, key: bytes) -> Block | None:
        return self._blocks.get(key)

    def root(self, namespace: bytes, tenant: bytes | None = None) -> Block:
        """The node above the first blocks of a namespace. Its tenant never changes."""
        root = self._roots.get(namespace)
        if root is None:
            root = Block(namespace, None, Tokens(), BlockKind(0, exact=True), tenant or b"")
            self._roots[namespace] = root
        return root

    def is_full(self, block: Block) -> bool:
        """Whether other blocks may follow. A tail has no children."""
        return len(block.tokens.packed) == self._block_bytes

    def could_hold(self, tokens: Tokens) -> bool:
        """Whether these are the tokens of a full block or a tail."""
        size = len(tokens.packed)
        return 0 < size <= self._block_bytes and size % TOKEN_BYTES == 0

    def match(self, namespace: bytes, tokens: Tokens) -> Match:
        """The longest stored prefix of these tokens."""
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
        """Blocks with a checkpoint on the path of these tokens, longest prefix first. None of them
        ends in the middle of an image."""
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
            for block in chain(tail, _prefixes(node, chunk), [node]):
                if block.resumable and tokens.whole_media(block.stop) == block.stop:
                    yield block

    def place(self, handle: PrefixHandle, node: Block | None = None) -> None:
        """Attach a conversation to the last block, at or below `node`, that holds state of it."""
        node = node or self.root(handle.namespace, handle.tenant)
        packed = handle.tokens.packed
        offset = node.stop * TOKEN_BYTES
        while offset + self._block_bytes < len(packed):  # the last part may end in a tail
            child = node.children.get(packed[offset : offset + self._block_bytes])
            if child is None:
                break
            node, offset = child, offset + self._block_bytes
        while child := _continuing_child(node, self._next(node, packed), packed):
            node = child
        self._move(handle, node)

    def detach(self, handle: PrefixHandle) -> None:
        """Detach a conversation from the tree."""
        self._move(handle, None)

    def _move(self, handle: PrefixHandle, node: Block | None) -> None:
        """Only this method changes the block in which a conversation ends."""
        before, handle.block = handle.block, node
        if before is node:
            return
        for block, sign in difference(node, before):
            handle.state_bytes += sign * block.size_bytes
            block.users += sign
        if before is not None:
            before.handles.remove(handle)
            if not before.handles:
                before.handles = NO_HANDLES
                self._forget_unused(before)
        if node is not None:
            if node.handles is NO_HANDLES:
                node.handles = Handles()
            node.handles.add(handle, self._next(node, handle.tokens.packed))

    def add(
        self,
        namespace: bytes,
        parent: Block | None,
        tokens: Tokens,
        kind: BlockKind,
        *,
        key: bytes | None = None,
        tenant: bytes | None = None,
    ) -> Block:
        """Add a block under its parent, or under the root. `key` is its chain key if known."""
        above = parent or self.root(namespace, tenant)
        packed = tokens.packed
        assert packed not in above.children, "one block for the same tokens"
        assert self.could_hold(tokens), "a full block or a tail"
        block = Block(key or chain_key(above.key, tokens), above, tokens, kind)
        above.children[packed] = self._blocks[block.key] = block
        insort(above.order, packed)
        self._count(block, kind.size_bytes)
        return block

    def set_kind(self, block: Block, kind: BlockKind) -> None:
        """Change the kind of a block."""
        grown_bytes = kind.size_bytes - block.size_bytes
        block.kind = kind
        if grown_bytes:
            self._count(block, grown_bytes)
            for handle in (handle for each in subtree(block) for handle in each.handles):
                handle.state_bytes += grown_bytes

    def _count(self, block: Block, more_bytes: int) -> None:
        self.size_bytes[None] += more_bytes
        held_bytes = self.size_bytes[block.tenant] + more_bytes
        self.size_bytes[block.tenant] = held_bytes
        if not held_bytes:
            del self.size_bytes[block.tenant]

    def remove(self, block: Block) -> None:
        """Remove a leaf, and its root if that has no other child."""
        assert not block.children, "only leaves can be removed"
        above = block.parent
        assert above is not None
        if self._blocks.get(block.key) is block:
            del self._blocks[block.key]
            self._count(block, -block.size_bytes)
        del above.children[block.tokens.packed]
        above.order.pop(bisect_left(above.order, block.tokens.packed))
        if not block.handles:  # otherwise they are placed above it next
            self._forget_unused(above)

    def _forget_unused(self, root: Block) -> None:
        """Remove a root without children and conversations."""
        known = root.is_root and self._roots.get(root.key) is root
        if known and not root.children and not root.handles:
            del self._roots[root.key]

    def along(self, node: Block, tokens: Tokens) -> list[Block]:
        """Children on the path of these tokens, whether they hold more of them or fewer; longest
        first."""
        chunk = self._next(node, tokens.packed)
        if not chunk:
            return []
        same = [node.children[chunk]] if chunk in node.children else []
        longer = list(_longer(node, chunk))
        return [*reversed(longer), *same, *_prefixes(node, chunk)]

    def is_reached(self, block: Block) -> bool:
        """Whether a conversation uses this block. It ends in the block or below it, or it continues
        through a longer sibling."""
        above = block.parent
        assert above is not None
        return block.users > 0 or any(each.users for each in _longer(above, block.tokens.packed))

    def would_be_reached(self, parent: bytes, tokens: Tokens) -> bool:
        """Whether a conversation continues through a block with these tokens under this parent or
        root."""
        above, packed = self._blocks.get(parent) or self._roots.get(parent), tokens.packed
        if above is None:
            return False
        known = above.children.get(packed)
        if (known and known.users) or any(each.users for each in _longer(above, packed)):
            return True
        beside = ((tail, each) for tail in _prefixes(above, packed) for each in tail.handles)
        following = ((tail, self._next(above, each.tokens.packed)) for tail, each in beside)
        return bool(above.handles.along(tokens)) or any(
            rest.startswith(packed)
            or (packed.startswith(rest) and not _is_checkpoint_of(tail, rest))
            for tail, rest in following
        )

    def next_tokens(self, node: Block, tokens: Tokens) -> bytes:
        """The packed tokens of a conversation after a block, at most one block of them."""
        return self._next(node, tokens.packed)

    def first_blocks(self, tenant: bytes | None) -> Iterator[Block]:
        """The first block of every chain of a tenant, or of all tenants."""
        for root in self._roots.values():
            if tenant in (None, root.tenant):
                yield from root.children.values()

    def leaves(self) -> Iterator[Block | None]:
        """Walk all blocks. Yields each block without children, and None for every other block. The
        tree may change during the walk. Blocks that are added meanwhile may be left out."""
        found = [child for root in self._roots.values() for child in root.children.values()]
        while found:
            block = found.pop()
            is_leaf = self._blocks.get(block.key) is block and not block.children
            found.extend(block.children.values())
            yield block if is_leaf else None

    def _next(self, node: Block, packed: bytes) -> bytes:
        """The packed tokens after a block, at most one block of them."""
        start = node.stop * TOKEN_BYTES
        return packed[start : start + self._block_bytes]

    def longer(self, parent: bytes, tokens: Tokens) -> Iterator[Block]:
        """Blocks under this parent or root that begin with these tokens and are longer."""
        above = self._blocks.get(parent) or self._roots.get(parent)
        return _longer(above, tokens.packed) if above is not None else iter(())


def _match_part(node: Block, found: list[Block], chunk: bytes, tokens: int) -> Match:
    """Add the child that shares most with the chunk. In sorted order it is a neighbour of it."""
    at = bisect_left(node.order, chunk)
    near = node.order[max(at - 1, 0) : at + 1]
    shared = [common_prefix(packed, chunk) for packed in near]
    most = max(shared, default=0)
    best = [packed for packed, count in zip(near, shared, strict=True) if count == most]
    cut = most * TOKEN_BYTES
    diverged = len(chunk) > cut and any(len(packed) > cut for packed in best)
    if most:
        found.append(node.children[best[-1]])  # the longer one of two equals
    return Match(tuple(found), tokens + most, diverged)


def _is_checkpoint_of(tail: Block, rest: bytes) -> bool:
    """Whether a conversation that ends with these tokens stays in this tail, whatever is stored."""
    return tail.resumable and len(rest) - len(tail.tokens.packed) <= TOKEN_BYTES


def _continuing_child(node: Block, chunk: bytes, packed: bytes) -> Block | None:
    """The child in which a conversation continues; `chunk` are its next tokens after the node.

    It prefers a checkpoint of the conversation's end, or of the token before, where a reply ends.
    Then comes a child that holds the whole chunk, then the longest tail that the chunk begins with.
    """
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
    """Shorten a match that ends inside an image, because state inside an image cannot be used."""
    most = tokens.whole_media(match.tokens)
    if most == match.tokens:
        return match
    blocks = tuple(block for block in match.blocks if block.start < most)
    return Match(blocks, most, match.diverged)


def shorter(block: Block) -> list[Block]:
    """Siblings whose tokens are a proper prefix of this block's tokens."""
    above = block.parent
    assert above is not None
    return list(_prefixes(above, block.tokens.packed))


def _longer(above: Block, packed: bytes) -> Iterator[Block]:
    at = bisect_right(above.order, packed)
    while at < len(above.order) and above.order[at].startswith(packed):
        yield above.children[above.order[at]]
        at += 1


def _prefixes(above: Block, packed: bytes) -> Iterator[Block]:
    """Children whose tokens are a proper prefix of these, longest first."""
    while at := bisect_left(above.order, packed):
        packed = packed[: common_prefix(above.order[at - 1], packed) * TOKEN_BYTES]
        if found := above.children.get(packed):
            yield found
