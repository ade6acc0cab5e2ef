"""The conversations that end in a block, found by where they would go on."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING

from rekindle.kvcache.key import TOKEN_BYTES

if TYPE_CHECKING:  # a block has heads, and a head has a block
    from rekindle.kvcache.block import Block


class Head:
    """The end of a conversation: all its tokens, and the last block that holds state of it."""

    __slots__ = ("block", "packed", "pinned", "root", "serial")

    _serials = count()

    def __init__(self, root: bytes, packed: bytes, *, pinned: bool = False) -> None:
        self.root = root
        self.packed = packed
        self.pinned = pinned
        self.block: Block | None = None
        self.serial = next(self._serials)

    @property
    def tokens(self) -> int:
        return len(self.packed) // TOKEN_BYTES


class Heads:
    """Sorted by the tokens that follow: a busy root may have thousands, and a new block under it
    concerns a few."""

    __slots__ = ("_heads", "_order")

    def __init__(self) -> None:
        self._heads: dict[int, tuple[Head, bytes]] = {}
        self._order: list[tuple[bytes, int]] = []

    def __len__(self) -> int:
        return len(self._heads)

    def __iter__(self) -> Iterator[Head]:
        return iter([head for head, _ in self._heads.values()])

    def add(self, head: Head, rest: bytes) -> None:
        """`rest` are its next tokens, a block's worth at most."""
        self._heads[head.serial] = (head, rest)
        insort(self._order, (rest, head.serial))

    def remove(self, head: Head) -> None:
        _, rest = self._heads.pop(head.serial)
        self._order.pop(bisect_left(self._order, (rest, head.serial)))

    def along(self, packed: bytes) -> list[Head]:
        """Those that would go through a child with these tokens: it holds all of their next ones,
        or is a tail that these begin with."""
        found = [self._heads[serial][0] for serial in self._beginning_with(packed)]
        for stop in range(TOKEN_BYTES, len(packed), TOKEN_BYTES):
            found += [self._heads[serial][0] for serial in self._equal_to(packed[:stop])]
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


NO_HEADS = Heads()  # of nearly every block; never added to
