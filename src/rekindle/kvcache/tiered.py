"""The tree of blocks and the tiers that hold copies of them, kept in step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from rekindle.kvcache.block import Block, PrefixHandle, below
from rekindle.kvcache.tiers.base import Blob, Tier
from rekindle.kvcache.tree import Index
from rekindle.tokens import Tokens


@dataclass(slots=True)
class StoreCounts:
    """What the store has done since it was opened."""

    stored_blocks: int = 0
    stored_bytes: int = 0
    evicted_blocks: int = 0
    refused_blocks: int = 0
    evicted: Counter[bytes] = field(default_factory=Counter)  # blocks, by tenant


class TieredTree:
    """A block is in the tree as long as one tier holds a copy of it."""

    def __init__(self, index: Index, tiers: Sequence[Tier]) -> None:
        self.index = index
        self.tiers = tuple(tiers)  # the fastest first
        self.counts = StoreCounts()

    def knows(self, block: Block) -> bool:
        return self.index.get(block.key) is block

    def get(self, block: Block) -> Blob | None:
        """The block's state if a tier has it at hand."""
        if not self.knows(block):
            return None
        for tier in self.tiers:
            if (blob := tier.get(block)) is not None:
                # A copy may be of a better kind than the block: what comes after is left off.
                return blob if len(blob) == block.size_bytes else blob[: block.size_bytes]
        return None

    # -- letting go ----------------------------------------------------------------------------

    def remove(self, block: Block) -> None:
        """Forget a leaf of the tree."""
        above = block.parent
        assert above is not None
        for tier in self.tiers:
            tier.remove(block)
        self.index.remove(block)
        for handle in block.handles:  # they end above now, or in a sibling that holds their tokens
            self.index.place(handle, above)

    def drop(self, block: Block) -> None:
        """Forget a block that turned out bad, and everything that was computed on top of it."""
        if self.knows(block):
            for each in below(block):
                self.remove(each)

    def evict(self, block: Block) -> None:
        self.counts.evicted_blocks += 1
        self.counts.evicted[block.namespace] += 1
        self.remove(block)

    def leave(self, tier: Tier, block: Block, *, quarantine: bool = False) -> None:
        """Take a block, and so all below it, out of a tier; what no other tier holds together with
        everything above it is forgotten."""
        found = below(block)
        kept: set[Block | None] = {block.parent}
        for each in reversed(found):  # parents first
            if each.parent in kept and each.copies.keys() - {tier.name}:
                kept.add(each)
        for each in found:
            tier.remove(each, quarantine=quarantine and each is block)
            if each not in kept:
                self.remove(each)

    def release(self, handle: PrefixHandle) -> int:
        """Forget a conversation's end and all state that is no other's; the bytes freed."""
        block, top = handle.block, None
        self.index.lift(handle)
        while block is not None and not block.is_root and not _is_wanted(block, top):
            block, top = block.parent, block
        gone = below(top) if top else []
        for each in gone:
            self.remove(each)
        if block is not None:
            gone += self._clear_along(block, handle.tokens)
        return sum(each.size_bytes for each in gone)

    def _clear_along(self, node: Block, tokens: Tokens) -> list[Block]:
        """Remove what lies under a block along a conversation that is gone, unless another goes
        through it."""
        gone = []
        for child in self.index.along(node, tokens):
            longer = self.index.longer(node.key, child.tokens)
            if not any(each.handles for other in (child, *longer) for each in below(other)):
                gone += below(child)
                for each in below(child):
                    self.remove(each)
        return gone

    # -- taking in -----------------------------------------------------------------------------

    def cover(self, block: Block) -> None:
        """Let go of the tails that a block covers; of a persistent one, not before the block is
        stored, and never of a pinned one, which was promised, or of one with a checkpoint. Then let
        the conversations that go through the block end there."""
        for covered in self.index.shorter(block):
            replaced = (block.exact or not covered.exact) and not covered.resumable
            needed = covered.is_persistent and not block.stored
            if replaced and not needed and not covered.is_pinned:
                self.remove(covered)
        self._descend(block)

    def _descend(self, block: Block) -> None:
        """Conversations that end above a new block, or in a tail beside it, may go through it; and
        one that a longer block holds may end in it, if it has its checkpoint."""
        above = block.parent
        assert above is not None
        beside = [handle for tail in self.index.shorter(block) for handle in tail.handles]
        if block.resumable:
            longer = self.index.longer(above.key, block.tokens)
            beside += [handle for other in longer for handle in other.handles]
        for handle in (*above.handles.along(block.tokens), *beside):
            self.index.place(handle, above)


def _is_wanted(block: Block, known: Block | None) -> bool:
    """Whether a conversation ends in this block or below it; in its child `known` none does."""
    others = (child for child in block.children.values() if child is not known)
    return bool(block.handles) or any(each.handles for child in others for each in below(child))
