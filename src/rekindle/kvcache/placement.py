"""Which tier holds a block, and what makes room for it."""

from __future__ import annotations

from collections import deque
from itertools import takewhile

from rekindle.kvcache.block import Block, WriteBack, chain
from rekindle.kvcache.tiered import TieredTree
from rekindle.kvcache.tiers.base import Blob, Tier
from rekindle.tokens import Tokens

Needed = tuple[Block | None, ...]  # what room may not be made with


class Placement:
    """Moves copies of blocks between tiers. A tier below the first is closed under parents, so
    they are always written before and removed after their children.

    What may be written late goes down one tier when memory runs out; what is to be written soon is
    in the `WriteBackQueue`.
    """

    def __init__(self, tiered: TieredTree, least_chance: float = 0.0) -> None:
        """What may be written late is, if it is at least as likely as this to be used again."""
        self._tiered = tiered
        self._least_chance = least_chance
        self._tree = tiered.tree
        self._first, *self._lower = tiered.tiers
        self._under = {
            tier.name: tiered.tiers[level:] for level, tier in enumerate(tiered.tiers, start=1)
        }
        self._names_under = {
            name: frozenset(tier.name for tier in tiers) for name, tiers in self._under.items()
        }

    # -- writing down --------------------------------------------------------------------------

    def write(self, tier: Tier, block: Block, *needed: Block | None) -> bool:
        """Have a block written, after those above it that are not; False: it cannot be. Room for
        it is not made at the cost of what is needed."""
        missing = self._missing(tier, block) if tier.takes_writes else None
        if missing is None:
            return False
        for each in reversed(missing):
            cost = tier.cost(each.tokens, each.size_bytes)
            if not self.make_room(tier, cost, each.parent, *needed):
                return False
            blob = self._tiered.get(each)  # making room may have taken it
            if blob is None:
                return False
            tier.put(each, blob)
        return True

    def _missing(self, tier: Tier, block: Block) -> list[Block] | None:
        """A block and those above it that a tier does not hold, up to the first that it does; None:
        it cannot have them all."""
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

    # -- taking in -----------------------------------------------------------------------------

    def tier_for(
        self, above: Block | None, tokens: Tokens, state_bytes: int, write_back: WriteBack
    ) -> Tier | None:
        """The first tier that takes a new block; there is room for it now."""
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

    def tiers_again(self, known: Block, state_bytes: int) -> list[Tier] | None:
        """The tiers that hold a block as it becomes another kind, with room for it: the first, if
        it has any, and all below that hold it now; None: one of those has no room."""
        cost = self._first.cost(known.tokens, state_bytes)
        held = known.copies.get(self._first.name)
        in_first = self.make_room(self._first, cost - (held.size_bytes if held else 0), known)
        if in_first and not self._first.holds(known):  # what it took before may have made room
            in_first = self.make_room(self._first, cost, known)
        if not in_first and (self._first.holds(known) or not self._is_below(self._first, known)):
            return None
        for tier in self._lower:
            if tier.holds(known) and not self._takes_again(tier, known, state_bytes, in_first):
                return None
        lower = [tier for tier in self._lower if tier.holds(known)]
        return [self._first, *lower] if in_first else lower

    def _takes_again(self, tier: Tier, known: Block, state_bytes: int, in_first: bool) -> bool:
        """What the first tier does not hold, too, waits in memory to be written."""
        held = known.copies[tier.name]
        more = tier.cost(known.tokens, state_bytes) - held.size_bytes
        return (in_first or tier.has_queue_room) and self.make_room(tier, more, known)

    def promote(self, block: Block, blob: Blob) -> None:
        """Keep in the first tier what was read from below, if there is room."""
        cost = self._first.cost(block.tokens, len(blob))
        if not self._first.holds(block) and self.make_room(self._first, cost, block):
            self._first.put(block, blob)

    # -- making room ---------------------------------------------------------------------------

    def make_room(self, tier: Tier, cost: int, *needed: Block | None) -> bool:
        """Empty a tier of leaves: not of pins, not of what is needed, unless it is the first and a
        tier below has it, and of none when that would not do."""
        if tier.budget.fits(cost):
            return True
        spared = _Spared(self, tier, needed)
        if not self._could_make_room(tier, cost, spared, needed):
            return False
        while not tier.budget.fits(cost):
            key = tier.budget.next_victim(spared)
            block = self._tree.get(key) if key is not None else None
            if block is None:  # all that is left is pinned, or needed
                return False
            self._give_up(tier, block, needed)
        return True

    def _could_make_room(self, tier: Tier, cost: int, spared: _Spared, needed: Needed) -> bool:
        """Whether so much would fit beside what stays. One leaf does it mostly; else the chains of
        what is needed have to be walked."""
        if tier is not self._first:
            return tier.budget.could_fit(cost)
        key = tier.budget.next_victim(spared)
        victim = self._tree.get(key) if key is not None else None
        if victim is not None and tier.budget.fits(cost - victim.copies[tier.name].size_bytes):
            return True
        return tier.budget.could_fit(cost + self._kept_bytes(needed))

    def _kept_bytes(self, needed: Needed) -> int:
        """What needed blocks and those above them take of the first tier, unless a tier below has
        them or takes them now."""
        total_bytes = 0
        for block in needed:
            if block is not None:
                self._demote(self._first, block, needed)
            for each in chain(block):
                if self._is_below(self._first, each):
                    break  # and so are those above it: tiers below are closed under parents
                if copy := each.copies.get(self._first.name):
                    total_bytes += copy.size_bytes
        return total_bytes

    def _give_up(self, tier: Tier, block: Block, needed: Needed) -> None:
        """Move a block out of a tier: down, or up where it is anyway, or out of the store."""
        if self._demote(tier, block, needed):
            tier.remove(block)
        elif len(block.copies) > 1:
            tier.remove(block)
            if not any(each.holds(block) for each in self._lower):
                block.write_back = WriteBack.NEVER  # or it would come straight back
        else:
            self._tiered.evict(block)

    def _demote(self, tier: Tier, block: Block, needed: Needed) -> bool:
        """Whether a tier below has the block, or takes it now; not one whose queue is full, for
        what waits to be written takes memory too."""
        if self._is_below(tier, block):
            return True
        if block.write_back is WriteBack.NEVER or self._is_unlikely(tier, block):
            return False
        under = self._under[tier.name]
        return any(each.has_queue_room and self.write(each, block, *needed) for each in under)

    def _is_unlikely(self, tier: Tier, block: Block) -> bool:
        """Whether a block that leaves a tier is not worth being written down."""
        is_late = block.write_back is WriteBack.LATE
        return is_late and tier.budget.reuse_probability(block) < self._least_chance

    def _is_below(self, tier: Tier, block: Block) -> bool:
        return not self._names_under[tier.name].isdisjoint(block.copies)

    def may_go(self, tier: Tier, block: Block, needed: Needed) -> bool:
        """Whether a tier may let go of a block to make room. Below the first tier not of what is
        needed there. Of what a tier below has, if it is surely there or not pinned; else not of
        what is pinned or needed, and below the first tier of nothing that others depend on."""
        is_needed = any(block is each for each in needed)
        if is_needed and tier is not self._first:
            return False
        below = self._names_under[tier.name]
        copies = [copy for name, copy in block.copies.items() if name in below]
        if any(copy.written for copy in copies) or (copies and not block.is_pinned):
            return True
        has_dependents = tier is not self._first and bool(block.children)
        return not (is_needed or block.is_pinned or has_dependents)


class _Spared:
    """What a tier may not let go of now."""

    def __init__(self, placement: Placement, tier: Tier, needed: Needed) -> None:
        self._placement = placement
        self._tier = tier
        self._needed = needed

    def __contains__(self, key: object) -> bool:
        assert isinstance(key, bytes)
        block = self._placement._tree.get(key)
        return block is None or not self._placement.may_go(self._tier, block, self._needed)


# ----------------------------------------------------------------------
# Blocks on their way down: what is written behind the turns, and what before an end.


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
