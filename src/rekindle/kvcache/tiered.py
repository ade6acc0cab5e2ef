"""The tiers in order, and the tree of blocks that they hold copies of, kept in step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from rekindle.kvcache.block import NO_HANDLES, Block, WriteBack, below
from rekindle.kvcache.tiers.base import Blob, StoredBlock, Tier
from rekindle.kvcache.tree import Tree, shorter


class Tiers(tuple[Tier, ...]):
    """The tiers of a store, the fastest first."""

    __slots__ = ()

    def get(self, block: Block) -> Blob | None:
        """The block's state if a tier has it at hand."""
        for tier in self:
            if (blob := tier.get(block)) is not None:
                # A copy may be of a better kind than the block: what comes after is left off.
                return blob if len(blob) == block.size_bytes else blob[: block.size_bytes]
        return None

    def source(self, block: Block) -> Tier:
        """The fastest tier to have a block from; what is at hand counts as in the first."""
        if self.get(block) is not None:
            return self[0]
        return next(tier for tier in self if tier.holds(block))

    def slowest(self, blocks: Iterable[Block]) -> str | None:
        """Where the one that takes longest to have is."""
        return self.slower(*(self.source(block).name for block in blocks))

    def slower(self, *names: str) -> str | None:
        """The slowest of these tiers; None: none was named."""
        return next((tier.name for tier in reversed(self) if tier.name in names), None)

    def held_bytes(self, namespace: bytes | None) -> dict[str, int]:
        """What a tenant holds of each tier, or all of them together."""
        if namespace is None:
            return {tier.name: tier.budget.used_bytes for tier in self}
        return {tier.name: tier.budget.held_bytes(namespace) for tier in self}

    @property
    def is_congested(self) -> bool:
        """Whether a tier has as much waiting to be written as it may."""
        return not all(tier.has_queue_room for tier in self)

    def flush(self, then: Callable[[bool], None]) -> None:
        """Call back on this thread when all that was asked for before is done or has failed, with
        whether what was removed and remembered is so in every tier."""
        outcomes: list[bool] = []

        def flushed(is_safe: bool) -> None:
            outcomes.append(is_safe)
            if len(outcomes) == len(self):
                then(all(outcomes))

        for tier in self:
            tier.flush(flushed)


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

    def __init__(self, tree: Tree, tiers: Iterable[Tier]) -> None:
        self.tree = tree
        self.tiers = Tiers(tiers)
        self.counts = StoreCounts()

    def knows(self, block: Block) -> bool:
        return self.tree.get(block.key) is block

    def get(self, block: Block) -> Blob | None:
        """The block's state if a tier has it at hand."""
        return self.tiers.get(block) if self.knows(block) else None

    # -- letting go ----------------------------------------------------------------------------

    def remove(self, block: Block) -> None:
        """Forget a leaf of the tree."""
        above = block.parent
        assert above is not None
        for tier in self.tiers:
            tier.remove(block)
        self.tree.remove(block)
        for handle in block.handles:  # they end above now, or in a sibling that holds their tokens
            self.tree.place(handle, above)

    def drop(self, block: Block) -> None:
        """Forget a block that turned out bad, and everything that was computed on top of it."""
        if self.knows(block):
            for each in below(block):
                self.remove(each)

    def evict(self, block: Block) -> None:
        self.counts.evicted_blocks += 1
        self.counts.evicted[block.tenant] += 1
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

    # -- taking in -----------------------------------------------------------------------------

    def put(self, block: Block, blob: Blob, tiers: Iterable[Tier]) -> None:
        """Have these tiers take a copy; there is room for it."""
        for tier in tiers:
            tier.put(block, blob)
        self.counts.stored_blocks += 1
        self.counts.stored_bytes += len(blob)
        self.cover(block)

    def cover(self, block: Block) -> None:
        """Let go of the tails that a block covers; of a persistent one, not before the block is
        stored, and never of a pinned one, which was promised, or of one with a checkpoint. Then let
        the conversations that go through the block end there."""
        above = block.parent
        assert above is not None
        if len(above.children) == 1 and above.handles is NO_HANDLES:
            return  # as in nearly all of a long chain
        for covered in shorter(block):
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
        beside = [handle for tail in shorter(block) for handle in tail.handles]
        if block.resumable:
            longer = self.tree.longer(above.key, block.tokens)
            beside += [handle for other in longer for handle in other.handles]
        for handle in (*above.handles.along(block.tokens), *beside):
            self.tree.place(handle, above)

    # -- after a restart -----------------------------------------------------------------------

    def load(self) -> None:
        """Take in what each tier lists."""
        for tier in self.tiers:
            self.take_in(tier, tier.stored())

    def take_in(self, tier: Tier, blocks: Iterable[StoredBlock]) -> None:
        """Take in what a tier lists, parents first; what cannot be right is removed from it."""
        for found in blocks:
            key, parent, namespace, tokens, kind = found
            above = None if parent == namespace else self.tree.get(parent)
            block = self.tree.get(key)
            if not self._is_sound(tier, found, above, block):
                tier.discard(key)
                continue
            if block is None:
                size_bytes, exact, resumable = kind
                block = self.tree.add(
                    namespace,
                    above,
                    tokens,
                    size_bytes,
                    exact=exact,
                    resumable=resumable,
                    key=key,
                )
                block.write_back = WriteBack.SOON
            else:
                self.tree.set_kind(block, block.kind.weaker(kind))
            tier.adopt(block, kind)
            self.cover(block)

    def _is_sound(
        self, tier: Tier, found: StoredBlock, above: Block | None, known: Block | None
    ) -> bool:
        """Whether it has a place in the tree. That its key is the one of its tokens is the tier's
        word: a wrong one names a record that says so when it is read."""
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
