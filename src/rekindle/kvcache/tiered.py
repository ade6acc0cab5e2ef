"""Keeps the tree of blocks in step with the copies that the tiers hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from rekindle.kvcache.block import NO_HANDLES, Block, WriteBack, subtree
from rekindle.kvcache.tiers.base import StoredBlock, Tier, Tiers
from rekindle.kvcache.tree import Tree, shorter
from rekindle.memory import Buffer


@dataclass(slots=True)
class StoreCounts:
    """Counts since the store was opened."""

    stored_blocks: int = 0
    stored_bytes: int = 0
    evicted_blocks: int = 0
    refused_blocks: int = 0
    evicted: Counter[bytes] = field(default_factory=Counter)  # blocks, by tenant


class TieredTree:
    """A block stays in the tree as long as one tier holds a copy of it."""

    def __init__(self, tree: Tree, tiers: Iterable[Tier]) -> None:
        self.tree = tree
        self.tiers = Tiers(tiers)
        self.counts = StoreCounts()

    def knows(self, block: Block) -> bool:
        return self.tree.get(block.key) is block

    def get(self, block: Block) -> Buffer | None:
        """The block's state if a tier has it in memory."""
        return self.tiers.get(block) if self.knows(block) else None

    def put(self, block: Block, blob: Buffer, tiers: Iterable[Tier]) -> None:
        """Store a copy in these tiers, which have room for it."""
        for tier in tiers:
            tier.put(block, blob)
        self.counts.stored_blocks += 1
        self.counts.stored_bytes += len(blob)
        self.cover(block)

    def cover(self, block: Block) -> None:
        """Remove shorter tails that this block covers, and move conversations to it.

        A persistent tail stays until the block is stored. A pinned tail stays because it was
        promised, and a tail with a checkpoint stays because the block does not replace that.
        """
        above = block.parent
        assert above is not None
        if len(above.children) == 1 and above.handles is NO_HANDLES:
            return  # the usual case in a long chain
        for covered in shorter(block):
            replaced = (block.exact or not covered.exact) and not covered.resumable
            needed = covered.is_persistent and not block.stored
            if replaced and not needed and not covered.is_pinned:
                self.remove(covered)
        self._place_conversations(block)

    def _place_conversations(self, block: Block) -> None:
        """Place conversations again that may end in or below a new block.

        These end above it, or in a tail that it covers. If the block has a checkpoint, also those
        that end in a longer sibling.
        """
        above = block.parent
        assert above is not None
        siblings = shorter(block)
        if block.resumable:
            siblings += self.tree.longer(above.key, block.tokens)
        beside = [handle for sibling in siblings for handle in sibling.handles]
        for handle in (*above.handles.along(block.tokens), *beside):
            self.tree.place(handle, above)

    def remove(self, block: Block) -> None:
        """Remove a leaf from the tree and from every tier."""
        above = block.parent
        assert above is not None
        for tier in self.tiers:
            tier.remove(block)
        self.tree.remove(block)
        for handle in block.handles:  # they now end above, or in a sibling that has their tokens
            self.tree.place(handle, above)

    def drop(self, block: Block) -> None:
        """Remove a bad block and every block that was computed on top of it."""
        if self.knows(block):
            for each in subtree(block):
                self.remove(each)

    def evict(self, block: Block) -> None:
        self.counts.evicted_blocks += 1
        self.counts.evicted[block.tenant] += 1
        self.remove(block)

    def remove_from(self, tier: Tier, block: Block, *, quarantine: bool = False) -> None:
        """Remove a block and its descendants from one tier. Blocks that no other tier holds
        together with all their ancestors are removed from the tree."""
        found = subtree(block)
        kept: set[Block | None] = {block.parent}
        for each in reversed(found):  # parents first
            if each.parent in kept and each.copies.keys() - {tier.name}:
                kept.add(each)
        for each in found:
            tier.remove(each, quarantine=quarantine and each is block)
            if each not in kept:
                self.remove(each)

    def load(self, tier: Tier, blocks: Iterable[StoredBlock]) -> None:
        """Add the blocks that a tier held when it was opened, parents first. Blocks that have no
        valid place in the tree are removed from the tier."""
        for found in blocks:
            key, parent, namespace, tokens, kind = found
            above = None if parent == namespace else self.tree.get(parent)
            block = self.tree.get(key)
            if not self._is_sound(tier, found, above, block):
                tier.discard(key)
                continue
            if block is None:
                block = self.tree.add(namespace, above, tokens, kind, key=key)
                block.write_back = WriteBack.SOON
            else:
                self.tree.set_kind(block, block.kind.weaker(kind))
            tier.adopt(block, kind)
            self.cover(block)

    def _is_sound(
        self, tier: Tier, found: StoredBlock, above: Block | None, known: Block | None
    ) -> bool:
        """Whether a stored block has a valid place in the tree. Its key is not checked here: a
        record with a wrong key is detected when it is read."""
        _, parent, namespace, tokens, kind = found
        if parent != namespace and (
            above is None
            or tier.name not in above.copies
            or not self.tree.is_full(above)
            or above.namespace != namespace
        ):
            return False
        is_new = known is None or not tier.holds(known)
        return is_new and self.tree.could_hold(tokens) and kind.size_bytes >= 0
