"""Defines blocks: their chain keys, their copies in tiers, and the conversations that end in them.

A chain key is a hash over everything up to the end of its block. A chain begins in a namespace.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
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
    exact: bool
    resumable: bool = False

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


class Block:
    """A node of the tree. Every copy can serve the block's kind.

    `exact` means that it was computed in canonical prefill steps. `resumable` means that it has a
    checkpoint of its end.
    """

    __slots__ = (
        "children",
        "copies",
        "exact",
        "handles",
        "key",
        "namespace",
        "order",
        "parent",
        "resumable",
        "size_bytes",
        "start",
        "tenant",
        "tokens",
        "write_back",
    )

    def __init__(
        self,
        key: bytes,
        parent: Block | None,
        tokens: Tokens,
        kind: BlockKind,
        tenant: bytes | None = None,
    ) -> None:
        self.key = key
        self.parent = parent
        self.namespace: bytes = parent.namespace if parent else key
        self.tenant: bytes = parent.tenant if parent else tenant or key
        self.tokens = tokens
        self.size_bytes, self.exact, self.resumable = kind
        self.copies: dict[str, Copy] = {}  # by the tier's name
        self.write_back = WriteBack.NEVER
        self.handles = NO_HANDLES  # conversations that end here
        self.start: int = parent.start + len(parent.tokens) if parent else 0
        self.children: dict[bytes, Block] = {}  # by packed tokens, which cannot collide
        self.order: list[bytes] = []  # the children's packed tokens, sorted

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    @property
    def kind(self) -> BlockKind:
        return BlockKind(self.size_bytes, self.exact, self.resumable)

    @kind.setter
    def kind(self, kind: BlockKind) -> None:
        self.size_bytes, self.exact, self.resumable = kind

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


class PrefixHandle:
    """The end of a conversation: its tokens, and the last block that holds state of it.

    A tenant is identified by its default namespace. State of another KV type has its own.
    """

    __slots__ = ("block", "namespace", "pinned", "serial", "state_bytes", "tenant", "tokens")

    _serials = count()

    def __init__(
        self, namespace: bytes, tokens: Tokens, *, pinned: bool = False, tenant: bytes | None = None
    ) -> None:
        self.namespace = namespace
        self.tenant = tenant or namespace
        self.tokens = tokens
        self.pinned = pinned
        self.block: Block | None = None
        self.state_bytes = 0  # of all blocks up to that one, including shared ones
        self.serial = next(self._serials)


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


def chain(block: Block | None) -> Iterator[Block]:
    """This block and its ancestors, without the root."""
    while block is not None and block.parent is not None:
        yield block
        block = block.parent


def size_difference(block: Block | None, other: Block | None) -> int:
    """Bytes of the chain up to `block` minus those up to `other`. Shared ancestors are skipped."""
    more = 0
    while block is not other:
        if block is not None and (other is None or block.stop >= other.stop):
            more += block.size_bytes
            block = block.parent
        elif other is not None:
            more -= other.size_bytes
            other = other.parent
    return more


def subtree(block: Block) -> list[Block]:
    """This block and its descendants, children first."""
    found = [block]
    for parent in found:  # the list grows while it is walked
        found.extend(parent.children.values())
    return found[::-1]
