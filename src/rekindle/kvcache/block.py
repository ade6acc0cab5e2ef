"""Blocks in their tree, and when they are to be written."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

from rekindle.kvcache.handles import NO_HEADS
from rekindle.kvcache.key import TOKEN_BYTES


class Wish(IntEnum):
    """When a block is to be written to disk."""

    NEVER = 0  # it lives and dies in memory
    LATE = 1  # when memory runs out, or the server stops
    SOON = 2  # behind the turn that computed it


class Kind(NamedTuple):
    """What a block's state is; the better is the larger."""

    size_bytes: int
    exact: bool
    resumable: bool


class Block:
    """A node of the tree. `exact` says it was computed in canonical prefill steps, `resumable` that
    it holds a checkpoint of its end, too."""

    __slots__ = (
        "children",
        "disk_bytes",
        "exact",
        "filed",
        "heads",
        "key",
        "order",
        "packed",
        "parent",
        "resumable",
        "root",
        "size_bytes",
        "start",
        "wish",
    )

    def __init__(
        self,
        key: bytes,
        parent: Block | None,
        packed: bytes,
        size_bytes: int,
        *,
        exact: bool,
        resumable: bool = False,
    ) -> None:
        self.key = key
        self.parent = parent
        self.root: bytes = parent.root if parent else key
        self.packed = packed
        self.size_bytes = size_bytes  # of its state
        self.exact = exact
        self.resumable = resumable
        self.disk_bytes = 0  # what it takes on disk, or will when its turn to be written comes
        self.filed: Kind | None = None  # what is on disk for certain
        self.wish = Wish.NEVER
        self.heads = NO_HEADS  # conversations whose state ends here
        self.start: int = parent.stop if parent else 0
        self.children: dict[bytes, Block] = {}  # by their tokens: no key can mistake them
        self.order: list[bytes] = []  # the children's packed tokens, sorted

    @property
    def tokens(self) -> int:
        return len(self.packed) // TOKEN_BYTES

    @property
    def stop(self) -> int:
        return self.start + self.tokens

    @property
    def kind(self) -> Kind:
        return Kind(self.size_bytes, self.exact, self.resumable)

    @kind.setter
    def kind(self, kind: Kind) -> None:
        self.size_bytes, self.exact, self.resumable = kind

    @property
    def stored(self) -> bool:
        """Whether it is on disk for certain."""
        return self.filed is not None

    @property
    def is_root(self) -> bool:
        return self.parent is None

    @property
    def is_pinned(self) -> bool:
        return any(head.pinned for head in self.heads)

    def holds(self, parent: bytes, packed: bytes) -> bool:
        """Whether it is the block of these tokens: an equal key is a hint, tokens decide."""
        return self.packed == packed and self.parent is not None and self.parent.key == parent


def chain(block: Block | None) -> Iterator[Block]:
    """This block and those above it, the root left out."""
    while block is not None and not block.is_root:
        yield block
        block = block.parent


def below(block: Block) -> list[Block]:
    """This block and all under it, children first."""
    found = [block]
    for parent in found:  # grows as it is walked: parents first
        found.extend(parent.children.values())
    return found[::-1]
