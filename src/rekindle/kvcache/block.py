"""Defines blocks: their chain keys, their copies in tiers, and the conversations that end in them.

A chain key is a hash over everything up to the end of its block. A chain begins in a namespace.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field
from enum import IntEnum
from itertools import count
from typing import NamedTuple

from blake3 import blake3

from rekindle.tokens import TOKEN_BYTES, Tokens

KEY_BYTES = 32


def namespace(fingerprint: bytes, salt: bytes, block_tokens: int, secret: bytes = b"") -> bytes:
    """The root of all chains whose states are interchangeable. Without the server's secret nobody
    can tell which tenant it belongs to."""
    parts = (b"namespace", secret, fingerprint, salt, block_tokens.to_bytes(4, "big"))
    return blake3(b"".join(map(_framed, parts))).digest()


def kv_namespace(tenant: bytes, fingerprint: bytes, start_tokens: int) -> bytes:
    """The namespace of a tenant's state with another KV type. States whose quantisation starts at
    different tokens are different."""
    parts = (b"kv namespace 1", tenant, fingerprint, start_tokens.to_bytes(8, "big"))
    return blake3(b"".join(map(_framed, parts))).digest()


def chain_key(parent: bytes, tokens: Tokens) -> bytes:
    """The key of the block that holds these tokens after everything `parent` stands for."""
    return packed_chain_key(parent, tokens.packed)


def packed_chain_key(parent: bytes, packed: bytes) -> bytes:
    """The same with packed tokens. `_framed` is written out here because this runs per block."""
    sizes = len(parent).to_bytes(8, "big"), len(packed).to_bytes(8, "big")
    return blake3(b"".join((_BLOCK, sizes[0], parent, sizes[1], packed))).digest()


def _framed(part: bytes) -> bytes:
    """Puts the length in front, so that ("ab", "c") and ("a", "bc") differ."""
    return len(part).to_bytes(8, "big") + part


_BLOCK = _framed(b"block")


class WriteBack(IntEnum):
    """When a block is written to the tiers below the first."""

    NEVER = 0  # the block stays in memory
    LATE = 1  # when memory runs out or the server stops
    SOON = 2  # right after the turn that computed it


class BlockKind(NamedTuple):
    """Size and quality of a block's state. A checkpoint comes after the cells."""

    size_bytes: int
    exact: bool  # computed in canonical prefill steps
    resumable: bool = False  # with a checkpoint of its end

    def weaker(self, other: BlockKind) -> BlockKind:
        """The kind that both can serve. A checkpoint can be cut off."""
        return BlockKind(
            min(self.size_bytes, other.size_bytes),
            self.exact and other.exact,
            self.resumable and other.resumable,
        )


@dataclass(slots=True)
class Copy:
    """A tier's copy of a block."""

    size_bytes: int  # of the tier's budget, counted from `put`
    persistent: bool  # it survives the process
    written: BlockKind | None  # the kind that is stored; None while the first write is pending


@dataclass(slots=True, eq=False, repr=False)
class PrefixHandle:
    """The end of a conversation: its tokens, and the last block that holds state of it.

    A tenant is identified by its default namespace. State of another KV type has its own.
    """

    namespace: bytes
    tokens: Tokens
    _: KW_ONLY
    pinned: bool = False
    tenant: bytes = b""  # by default the namespace
    block: Block | None = None
    state_bytes: int = 0  # of all blocks up to that one, including shared ones
    #: The same tokens in the tenant's default namespace, if the state has another KV type. A turn
    #: computes the beginning in the default type and requantises it.
    default: PrefixHandle | None = None
    serial: int = field(default_factory=count().__next__)

    def __post_init__(self) -> None:
        self.tenant = self.tenant or self.namespace


class Handles:
    """The conversations that end in one block, sorted by their next tokens.

    A busy root may have thousands, and a new block under it concerns a few.
    """

    __slots__ = ("_handles", "_order")

    def __init__(self) -> None:
        self._handles: dict[int, tuple[PrefixHandle, bytes]] = {}
        self._order: list[tuple[bytes, int]] = []

    def __len__(self) -> int:
        return len(self._handles)

    def __iter__(self) -> Iterator[PrefixHandle]:
        return iter([handle for handle, _ in self._handles.values()])

    def add(self, handle: PrefixHandle, rest: bytes) -> None:
        """`rest` are its next tokens after the block, packed, at most one block of them."""
        self._handles[handle.serial] = (handle, rest)
        insort(self._order, (rest, handle.serial))

    def remove(self, handle: PrefixHandle) -> None:
        _, rest = self._handles.pop(handle.serial)
        self._order.pop(bisect_left(self._order, (rest, handle.serial)))

    def along(self, tokens: Tokens) -> list[PrefixHandle]:
        """The conversations that continue through a child with these tokens."""
        if not self._handles:
            return []
        packed = tokens.packed
        found = [self._handles[serial][0] for serial in self._beginning_with(packed)]
        for stop in range(TOKEN_BYTES, len(packed), TOKEN_BYTES):
            found += [self._handles[serial][0] for serial in self._equal_to(packed[:stop])]
        return found

    def ending_within(self, rest: bytes) -> Iterator[PrefixHandle]:
        """The conversations that have no more tokens, or whose next tokens are a prefix of these
        packed ones."""
        for stop in range(0, len(rest) + TOKEN_BYTES if self._handles else 0, TOKEN_BYTES):
            yield from [self._handles[serial][0] for serial in self._equal_to(rest[:stop])]

    def _beginning_with(self, packed: bytes) -> Iterator[int]:
        at = bisect_left(self._order, (packed, -1))
        while at < len(self._order) and self._order[at][0].startswith(packed):
            yield self._order[at][1]
            at += 1

    def _equal_to(self, packed: bytes) -> Iterator[int]:
        at = bisect_left(self._order, (packed, -1))
        while at < len(self._order) and self._order[at][0] == packed:
            yield self._order[at][1]
            at += 1


NO_HANDLES = Handles()  # shared by nearly all blocks, and never changed


@dataclass(slots=True, eq=False, repr=False)
class Block:
    """A node of the tree. Every copy can serve the block's kind."""

    key: bytes
    parent: Block | None
    tokens: Tokens
    kind: BlockKind
    tenant: bytes = b""  # that of its parent, or by default the namespace
    write_back: WriteBack = WriteBack.NEVER
    handles: Handles = NO_HANDLES  # conversations that end here
    users: int = 0  # number of conversations that end here or in a descendant
    copies: dict[str, Copy] = field(default_factory=dict)  # by the tier's name
    children: dict[bytes, Block] = field(default_factory=dict)  # by tokens, which cannot collide
    order: list[bytes] = field(default_factory=list)  # the children's packed tokens, sorted
    namespace: bytes = field(init=False)
    start: int = field(init=False)

    def __post_init__(self) -> None:
        above = self.parent
        self.namespace = above.namespace if above else self.key
        self.tenant = above.tenant if above else self.tenant or self.key
        self.start = above.stop if above else 0

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    @property
    def size_bytes(self) -> int:
        return self.kind.size_bytes

    @property
    def exact(self) -> bool:
        return self.kind.exact

    @property
    def resumable(self) -> bool:
        return self.kind.resumable

    @property
    def is_persistent(self) -> bool:
        """Whether a persistent tier has a copy, or will have one when it is written."""
        return any(copy.persistent for copy in self.copies.values())

    @property
    def stored(self) -> bool:
        """Whether it would survive a crash now."""
        return any(copy.persistent and copy.written for copy in self.copies.values())

    @property
    def is_root(self) -> bool:
        return self.parent is None

    @property
    def is_pinned(self) -> bool:
        return any(handle.pinned for handle in self.handles)

    def holds(self, parent: bytes, tokens: Tokens) -> bool:
        """Whether it is the block of these tokens. An equal key is only a hint."""
        return self.tokens == tokens and self.parent is not None and self.parent.key == parent


def chain(block: Block | None) -> Iterator[Block]:
    """This block and its ancestors, without the root."""
    while block is not None and block.parent is not None:
        yield block
        block = block.parent


def chain_tokens(block: Block) -> Tokens:
    """All tokens up to the end of a block."""
    return Tokens(b"".join(each.tokens.packed for each in reversed([*chain(block)])))


def difference(block: Block | None, other: Block | None) -> Iterator[tuple[Block, int]]:
    """The blocks up to `block` with 1, and those up to `other` with -1, roots included. Shared
    ancestors are skipped."""
    while block is not other:
        if block is not None and (other is None or block.stop >= other.stop):
            yield block, 1
            block = block.parent
        elif other is not None:
            yield other, -1
            other = other.parent


def subtree(block: Block) -> list[Block]:
    """This block and its descendants, children first."""
    found = [block]
    for parent in found:  # the list grows while it is walked
        found.extend(parent.children.values())
    return found[::-1]
