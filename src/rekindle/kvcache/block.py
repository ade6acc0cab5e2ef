"""Blocks: their keys, the copies that tiers hold of them, and the conversations that end in them.

A key is a hash over everything up to the end of its block; the chain begins in a namespace. A block
knows the conversations that end in it and a conversation the block it ends in, so both are in this
file.
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
    """The parent of every chain whose states may stand in for each other. Without the server's
    secret nobody can tell whose it is."""
    parts = (b"namespace", secret, fingerprint, salt, block_tokens.to_bytes(4, "big"))
    return blake3(b"".join(map(_framed, parts))).digest()


def kv_namespace(tenant: bytes, fingerprint: bytes, start_tokens: int) -> bytes:
    """Where a tenant's state of another precision lies: with the start of quantisation, before
    which it was computed in other cells, it is another state."""
    parts = (b"kv namespace 1", tenant, fingerprint, start_tokens.to_bytes(8, "big"))
    return blake3(b"".join(map(_framed, parts))).digest()


def chain_key(parent: bytes, tokens: Tokens) -> bytes:
    """The key of the block that holds these tokens after everything `parent` stands for."""
    return packed_chain_key(parent, tokens.packed)


def packed_chain_key(parent: bytes, packed: bytes) -> bytes:
    """The same of packed tokens. Framed as below, written out: this is called for every block."""
    sizes = len(parent).to_bytes(8, "big"), len(packed).to_bytes(8, "big")
    return blake3(b"".join((_BLOCK, sizes[0], parent, sizes[1], packed))).digest()


def _framed(part: bytes) -> bytes:
    """With its length before it: ("ab", "c") and ("a", "bc") never meet."""
    return len(part).to_bytes(8, "big") + part


_BLOCK = _framed(b"block")


class WriteBack(IntEnum):
    """When a block is written to the tiers below the first."""

    NEVER = 0  # it stays in memory only
    LATE = 1  # when memory runs out, or the server stops
    SOON = 2  # behind the turn that computed it


class BlockKind(NamedTuple):
    """What a block's state is; the better is the larger."""

    size_bytes: int
    exact: bool
    resumable: bool

    def weaker(self, other: BlockKind) -> BlockKind:
        """What both can serve: a checkpoint comes after the cells and can be left off."""
        return BlockKind(
            min(self.size_bytes, other.size_bytes),
            self.exact and other.exact,
            self.resumable and other.resumable,
        )


@dataclass(slots=True)
class Copy:
    """What one tier holds of a block."""

    size_bytes: int  # of the tier's budget, from the moment it was handed over
    persistent: bool  # it outlives the process
    written: BlockKind | None  # what is there for certain; None: still on its way


class Block:
    """A node of the tree. `exact` says it was computed in canonical prefill steps, `resumable` that
    it holds a checkpoint of its end, too. Every copy can serve what the block says it is."""

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
        size_bytes: int,
        *,
        exact: bool,
        resumable: bool = False,
        tenant: bytes | None = None,
    ) -> None:
        self.key = key
        self.parent = parent
        self.namespace: bytes = parent.namespace if parent else key
        self.tenant: bytes = parent.tenant if parent else tenant or key
        self.tokens = tokens
        self.size_bytes = size_bytes  # of its state
        self.exact = exact
        self.resumable = resumable
        self.copies: dict[str, Copy] = {}  # by the tier's name
        self.write_back = WriteBack.NEVER
        self.handles = NO_HANDLES  # conversations whose state ends here
        self.start: int = parent.start + len(parent.tokens) if parent else 0
        self.children: dict[bytes, Block] = {}  # by their tokens: no key can mistake them
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
        """Whether a tier that outlives the process has it, or will have it when it is written."""
        return any(copy.persistent for copy in self.copies.values())

    @property
    def stored(self) -> bool:
        """Whether it would outlive the process if that ended now."""
        return any(copy.persistent and copy.written for copy in self.copies.values())

    @property
    def is_root(self) -> bool:
        return self.parent is None

    @property
    def is_pinned(self) -> bool:
        return any(handle.pinned for handle in self.handles)

    def holds(self, parent: bytes, tokens: Tokens) -> bool:
        """Whether it is the block of these tokens: an equal key is a hint, tokens decide."""
        return self.tokens == tokens and self.parent is not None and self.parent.key == parent


class PrefixHandle:
    """The end of a conversation: all its tokens, and the last block that holds state of it.

    A tenant is known by the namespace of its usual state; state of another precision lies in a
    namespace of its own.
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
        self.state_bytes = 0  # of all blocks up to that one, whoever else shares them
        self.serial = next(self._serials)


class Handles:
    """Sorted by the tokens that follow: a busy root may have thousands, and a new block under it
    concerns a few."""

    __slots__ = ("_handles", "_order")

    def __init__(self) -> None:
        self._handles: dict[int, tuple[PrefixHandle, bytes]] = {}
        self._order: list[tuple[bytes, int]] = []

    def __len__(self) -> int:
        return len(self._handles)

    def __iter__(self) -> Iterator[PrefixHandle]:
        return iter([handle for handle, _ in self._handles.values()])

    def add(self, handle: PrefixHandle, rest: bytes) -> None:
        """`rest` are its next tokens, packed, a block's worth at most."""
        self._handles[handle.serial] = (handle, rest)
        insort(self._order, (rest, handle.serial))

    def remove(self, handle: PrefixHandle) -> None:
        _, rest = self._handles.pop(handle.serial)
        self._order.pop(bisect_left(self._order, (rest, handle.serial)))

    def along(self, tokens: Tokens) -> list[PrefixHandle]:
        """Those that would go through a child with these tokens: it holds all of their next ones,
        or is a tail that these begin with."""
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


NO_HANDLES = Handles()  # of nearly every block; never added to


def chain(block: Block | None) -> Iterator[Block]:
    """This block and those above it, the root left out."""
    while block is not None and block.parent is not None:
        yield block
        block = block.parent


def more_bytes(block: Block | None, other: Block | None) -> int:
    """How much more the chain up to a block takes than that up to another; what they share is not
    walked."""
    more = 0
    while block is not other:
        if block is not None and (other is None or block.stop >= other.stop):
            more += block.size_bytes
            block = block.parent
        elif other is not None:
            more -= other.size_bytes
            other = other.parent
    return more


def below(block: Block) -> list[Block]:
    """This block and all under it, children first."""
    found = [block]
    for parent in found:  # grows as it is walked: parents first
        found.extend(parent.children.values())
    return found[::-1]
