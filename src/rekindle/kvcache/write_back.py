"""Blocks on their way down: what is written behind the turns, and what before an end."""

from __future__ import annotations

from collections import deque
from itertools import takewhile

from rekindle.kvcache.block import Block, WriteBack, chain
from rekindle.kvcache.placement import Placement
from rekindle.kvcache.tiered import TieredTree
from rekindle.kvcache.tiers.base import Tier


class WriteBackQueue:
    """What is to be written soon goes to every tier below the first while its bytes are at hand; so
    a tier that has to make room seldom has to read what the next one down should have."""

    def __init__(self, tiered: TieredTree, placement: Placement) -> None:
        self._tiered = tiered
        self._tree = tiered.tree
        self._placement = placement
        self._lower = tiered.tiers[1:]
        #: By tier: blocks to be written as soon as its queue has room.
        self._dirty: dict[str, deque[Block]] = {tier.name: deque() for tier in self._lower}

    def ask(self, block: Block, write_back: WriteBack) -> None:
        """Have a block kept at least as long as this."""
        if write_back > block.write_back:
            block.write_back = write_back
            self._plan(block)
            self.feed()

    def _plan(self, block: Block) -> None:
        """Have a block written soon if it is to be. Tails wait in any case: the next turn makes a
        longer one of most of them."""
        if block.write_back is WriteBack.SOON and self._tree.is_full(block):
            for tier in self._lower:
                if not tier.holds(block) and tier.takes_writes:
                    self._dirty[tier.name].append(block)

    def feed(self) -> None:
        """Hand each tier as much as it takes."""
        for tier in self._lower:
            dirty = self._dirty[tier.name]
            while dirty and tier.takes_writes and tier.has_queue_room:
                block = dirty.popleft()
                if self._tiered.knows(block):
                    self._placement.write(tier, block)

    def plan_again(self) -> None:
        """Have written what a tier that had failed has missed."""
        for dirty in self._dirty.values():
            dirty.clear()
        for block in self._tree:
            self._plan(block)
        self.feed()

    def write_chain(self, block: Block) -> None:
        """Have a conversation written whole, its tail too, to the first tier below that takes it.
        Where a block is to outlive the process, so are those above it."""
        for each in takewhile(lambda each: not each.is_persistent, chain(block)):
            each.write_back = max(each.write_back, WriteBack.LATE)
        any(self._placement.write(tier, block) for tier in self._lower)

    def write_everything(self) -> None:
        """Have all written that may be; the order of the index is parents first, so a block whose
        parent has not got there cannot either."""
        for block in list(self._tree):
            if block.write_back > WriteBack.NEVER and self._tiered.knows(block):
                any(
                    _has_parent(tier, block) and self._placement.write(tier, block)
                    for tier in self._lower
                )


def _has_parent(tier: Tier, block: Block) -> bool:
    """Whether a tier holds what a block rests on there."""
    return block.parent is None or block.parent.is_root or tier.holds(block.parent)
