"""Decides which tier holds a block, evicts blocks to make room, and writes blocks to lower
tiers."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile

from rekindle.kvcache.block import NO_HANDLES, Block, WriteBack, chain, subtree
from rekindle.kvcache.tiers.base import StoredBlock, Tier, Tiers
from rekindle.kvcache.tree import Tree, shorter
from rekindle.memory import Buffer
from rekindle.tokens import Tokens


@dataclass(slots=True)
class StoreCounts:
    """Counts since the store was opened."""

    stored_blocks: int = 0
    stored_bytes: int = 0
    evicted_blocks: int = 0
    refused_blocks: int = 0
    evicted: Counter[bytes] = field(default_factory=Counter)  # blocks, by tenant


class TieredTree:
    """Keeps the tree of blocks in step with the copies that the tiers hold.

    A block stays in the tree as long as one tier holds a copy of it.
    """

    def __init__(self, tree: Tree, tiers: Iterable[Tier]) -> None:
        self.tree = tree
        self.tiers = Tiers(tiers)
        self.counts = StoreCounts()
        self.is_loading = False  # conversations that need a block may be missing still
        #: By the key of a block whose write is pending: stored siblings that it will replace.
        self._replaced: dict[bytes, list[Block]] = {}

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
        """Remove shorter tails that this block covers, and move conversations to it. Called when
        the block is added, and when it is stored.

        A persistent tail stays until the block is stored. A pinned tail stays because it was
        promised, and a tail with a checkpoint stays because the block does not replace that.
        """
        above = block.parent
        assert above is not None
        if len(above.children) == 1 and above.handles is NO_HANDLES:
            return  # the common case in a long chain
        for covered in shorter(block):
            replaced = (block.exact or not covered.exact) and not covered.resumable
            needed = covered.is_persistent and not block.stored
            if replaced and not needed and not covered.is_pinned:
                self.remove(covered)
        self._place_conversations(block)

    def _place_conversations(self, block: Block) -> None:
        """Find the last block again for conversations that may end in or below a new block.

        So far they end above it, or in a tail that it covers. If the block has a checkpoint, they
        may also end in a longer sibling. A sibling that no conversation uses any more is removed,
        unless it is not known yet which conversations there are. A stored sibling stays until the
        block is stored too: the write may fail.
        """
        above = block.parent
        assert above is not None
        longer = list(self.tree.longer(above.key, block.tokens)) if block.resumable else []
        longer = [sibling for sibling in longer if sibling.users]
        is_pending = block.is_persistent and not block.stored
        siblings = [*shorter(block), *longer]
        beside = [handle for sibling in siblings for handle in sibling.handles]
        for handle in (*above.handles.along(block.tokens), *beside):
            self.tree.place(handle, above)
        if not is_pending:
            longer += self._replaced.pop(block.key, [])
        for sibling in longer:
            if self.is_loading or not self.knows(sibling) or self.tree.is_reached(sibling):
                continue
            if is_pending and sibling.stored:
                self._replaced.setdefault(block.key, []).append(sibling)
            else:
                self.drop(sibling)

    def remove(self, block: Block) -> None:
        """Remove a leaf from the tree and from every tier."""
        above = block.parent
        assert above is not None
        for tier in self.tiers:
            tier.remove(block)
        self._replaced.pop(block.key, None)
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


Needed = tuple[Block | None, ...]  # blocks that must not be evicted


class Placement:
    """Moves copies of blocks between tiers.

    A tier below the first is closed under parents, so parents are written before their children
    and removed after them. A block with `LATE` write-back moves down when its tier runs out of
    space. A block with `SOON` is written by the `WriteBackQueue`.
    """

    def __init__(self, tiered: TieredTree, min_reuse_probability: float = 0.0) -> None:
        """A `LATE` block is only written if it is at least this likely to be used again."""
        self._tiered = tiered
        self._min_reuse_probability = min_reuse_probability
        self._tree = tiered.tree
        self._first, *self._lower = tiered.tiers
        self._under = {
            tier.name: tiered.tiers[level:] for level, tier in enumerate(tiered.tiers, start=1)
        }
        self._names_under = {
            name: frozenset(tier.name for tier in tiers) for name, tiers in self._under.items()
        }

    def tier_for(
        self, above: Block | None, tokens: Tokens, state_bytes: int, write_back: WriteBack
    ) -> Tier | None:
        """Find the first tier that takes a new block, and make room in it."""
        if self.make_room(self._first, self._first.cost(tokens, state_bytes), above):
            return self._first
        if write_back is WriteBack.NEVER:
            return None
        takers = (tier for tier in self._lower if self._takes(tier, above, tokens, state_bytes))
        return next(takers, None)

    def _takes(self, tier: Tier, above: Block | None, tokens: Tokens, state_bytes: int) -> bool:
        return (
            tier.takes_writes
            and tier.has_queue_room
            and (above is None or self.write(tier, above))
            and self.make_room(tier, tier.cost(tokens, state_bytes), above)
        )

    def tiers_for_replacement(self, known: Block, state_bytes: int) -> list[Tier] | None:
        """Make room for a better version of a block. Returns the tiers that take it: the first if
        it has room, and all lower tiers that hold the block. None if one of those has no room."""
        cost = self._first.cost(known.tokens, state_bytes)
        held = known.copies.get(self._first.name)
        in_first = self.make_room(self._first, cost - (held.size_bytes if held else 0), known)
        if in_first and not self._first.holds(known):  # making room may have evicted its old copy
            in_first = self.make_room(self._first, cost, known)
        if not in_first and (self._first.holds(known) or not self._is_below(self._first, known)):
            return None
        for tier in self._lower:
            if tier.holds(known) and not self._takes_again(tier, known, state_bytes, in_first):
                return None
        lower = [tier for tier in self._lower if tier.holds(known)]
        return [self._first, *lower] if in_first else lower

    def _takes_again(self, tier: Tier, known: Block, state_bytes: int, in_first: bool) -> bool:
        """Without a copy in the first tier, the block needs room in the write queue."""
        held = known.copies[tier.name]
        more = tier.cost(known.tokens, state_bytes) - held.size_bytes
        return (in_first or tier.has_queue_room) and self.make_room(tier, more, known)

    def promote(self, block: Block, blob: Buffer) -> None:
        """Copy a block that was read from a lower tier into the first, if there is room."""
        cost = self._first.cost(block.tokens, len(blob))
        if not self._first.holds(block) and self.make_room(self._first, cost, block):
            self._first.put(block, blob)

    def make_room(self, tier: Tier, cost: int, *needed: Block | None) -> bool:
        """Evict leaves until the cost fits. Evicts nothing if that could not help.

        Pinned and needed blocks are kept. From the first tier they may go if a lower tier has them.
        """
        if tier.budget.fits(cost):
            return True
        excluded = _Excluded(self, tier, needed)
        if not self._could_make_room(tier, cost, excluded, needed):
            return False
        while not tier.budget.fits(cost):
            key = tier.budget.next_victim(excluded)
            block = self._tree.get(key) if key is not None else None
            if block is None:
                return False
            self._evict(tier, block, needed)
        return True

    def _could_make_room(self, tier: Tier, cost: int, excluded: _Excluded, needed: Needed) -> bool:
        """Usually one leaf is enough. Otherwise the chains of needed blocks have to be walked."""
        if tier is not self._first:
            return tier.budget.could_fit(cost)
        key = tier.budget.next_victim(excluded)
        victim = self._tree.get(key) if key is not None else None
        if victim is not None and tier.budget.fits(cost - victim.copies[tier.name].size_bytes):
            return True
        return tier.budget.could_fit(cost + self._kept_bytes(needed))

    def _kept_bytes(self, needed: Needed) -> int:
        """Bytes in the first tier of needed blocks and their ancestors that no lower tier has or
        takes now."""
        total_bytes = 0
        for block in needed:
            if block is not None:
                self._demote(self._first, block, needed)
            for each in chain(block):
                if self._is_below(self._first, each):
                    break  # its ancestors are there too: lower tiers are closed under parents
                if copy := each.copies.get(self._first.name):
                    total_bytes += copy.size_bytes
        return total_bytes

    def _evict(self, tier: Tier, block: Block, needed: Needed) -> None:
        """Move a block out of a tier: down if possible, else out of this tier or the store."""
        if self._demote(tier, block, needed):
            tier.remove(block)
        elif len(block.copies) > 1:
            tier.remove(block)
            if not any(each.holds(block) for each in self._lower):
                block.write_back = WriteBack.NEVER  # otherwise it would be written again
        else:
            self._tiered.evict(block)

    def _demote(self, tier: Tier, block: Block, needed: Needed) -> bool:
        """Whether a lower tier has the block or takes it now. A tier with a full queue does not,
        because queued state takes memory too."""
        if self._is_below(tier, block):
            return True
        if block.write_back is WriteBack.NEVER or self._is_unlikely(tier, block):
            return False
        under = self._under[tier.name]
        return any(each.has_queue_room and self.write(each, block, *needed) for each in under)

    def _is_unlikely(self, tier: Tier, block: Block) -> bool:
        is_late = block.write_back is WriteBack.LATE
        return is_late and tier.budget.reuse_probability(block) < self._min_reuse_probability

    def _is_below(self, tier: Tier, block: Block) -> bool:
        return not self._names_under[tier.name].isdisjoint(block.copies)

    def may_evict(self, tier: Tier, block: Block, needed: Needed) -> bool:
        """Whether a tier may evict a block to make room."""
        is_needed = any(block is each for each in needed)
        if is_needed and tier is not self._first:
            return False
        below = self._names_under[tier.name]
        copies = [copy for name, copy in block.copies.items() if name in below]
        if any(copy.written for copy in copies) or (copies and not block.is_pinned):
            return True
        has_dependents = tier is not self._first and bool(block.children)
        return not (is_needed or block.is_pinned or has_dependents)

    def write(self, tier: Tier, block: Block, *needed: Block | None) -> bool:
        """Write a block to a tier, after its missing ancestors. Returns False if it cannot be
        written. Needed blocks are not evicted for it."""
        missing = self._missing(tier, block) if tier.takes_writes else None
        if missing is None:
            return False
        for each in reversed(missing):
            cost = tier.cost(each.tokens, each.size_bytes)
            if not self.make_room(tier, cost, each.parent, *needed):
                return False
            blob = self._tiered.get(each)  # making room may have evicted it
            if blob is None:
                return False
            tier.put(each, blob)
        return True

    def _missing(self, tier: Tier, block: Block) -> list[Block] | None:
        """The block and its ancestors that the tier does not hold, children first. None if the
        tier cannot take all of them."""
        missing: list[Block] = []
        total_bytes = 0
        for each in chain(block):
            if tier.holds(each):
                break
            is_unwanted = each.write_back is WriteBack.NEVER and each is not block
            total_bytes += tier.cost(each.tokens, each.size_bytes)
            if (
                is_unwanted
                or self._tiered.get(each) is None
                or not tier.budget.could_fit(total_bytes)
            ):
                return None
            missing.append(each)
        return missing


class _Excluded:
    """The keys that a tier must not evict now."""

    def __init__(self, placement: Placement, tier: Tier, needed: Needed) -> None:
        self._placement = placement
        self._tier = tier
        self._needed = needed

    def __contains__(self, key: object) -> bool:
        assert isinstance(key, bytes)
        block = self._placement._tree.get(key)
        return block is None or not self._placement.may_evict(self._tier, block, self._needed)


class WriteBackQueue:
    """Writes blocks to every lower tier while their bytes are in memory.

    So a tier that evicts a block seldom has to read it first for the next tier down.
    """

    def __init__(self, tiered: TieredTree, placement: Placement) -> None:
        self._tiered = tiered
        self._tree = tiered.tree
        self._placement = placement
        self._lower = tiered.tiers[1:]
        #: By tier: blocks that are written as soon as its queue has room.
        self._dirty: dict[str, deque[Block]] = {tier.name: deque() for tier in self._lower}

    def request(self, block: Block, write_back: WriteBack) -> None:
        """Raise a block's write-back to at least this."""
        if write_back > block.write_back:
            block.write_back = write_back
            self._enqueue(block)
            self.feed()

    def _enqueue(self, block: Block) -> None:
        """Queue a full `SOON` block. Tails wait, because the next turn usually extends them."""
        if block.write_back is WriteBack.SOON and self._tree.is_full(block):
            for tier in self._lower:
                if not tier.holds(block) and tier.takes_writes:
                    self._dirty[tier.name].append(block)

    def feed(self) -> None:
        """Hand each tier as many queued blocks as it takes."""
        for tier in self._lower:
            dirty = self._dirty[tier.name]
            while dirty and tier.takes_writes and tier.has_queue_room:
                block = dirty.popleft()
                if self._tiered.knows(block):
                    self._placement.write(tier, block)

    def rebuild(self) -> None:
        """Queue every block again, after a tier was opened or works again."""
        for dirty in self._dirty.values():
            dirty.clear()
        for block in self._tree:
            self._enqueue(block)
        self.feed()

    def write_chain(self, block: Block) -> None:
        """Write a conversation with its tail to the first lower tier that takes it."""
        for each in takewhile(lambda each: not each.is_persistent, chain(block)):
            each.write_back = max(each.write_back, WriteBack.LATE)
        any(self._placement.write(tier, block) for tier in self._lower)

    def write_everything(self) -> None:
        """Write all blocks that may be written. The tree lists parents first, so a block whose
        parent could not be written is skipped."""
        for block in list(self._tree):
            if block.write_back > WriteBack.NEVER and self._tiered.knows(block):
                any(
                    _has_parent(tier, block) and self._placement.write(tier, block)
                    for tier in self._lower
                )


def _has_parent(tier: Tier, block: Block) -> bool:
    return block.parent is None or block.parent.is_root or tier.holds(block.parent)
