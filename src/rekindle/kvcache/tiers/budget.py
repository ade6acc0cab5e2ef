"""The accounting that tiers have in common: what they may hold, what they do, and who holds it."""

from __future__ import annotations

from collections.abc import Container

from rekindle.kvcache.block import Block, BlockKind, Copy
from rekindle.kvcache.duel import Duel
from rekindle.kvcache.policy import Shares
from rekindle.protocol.settings import EvictionPolicy


class TierBudget:
    """Copies of blocks appear and vanish here alone."""

    def __init__(
        self,
        tier: str,
        limit_bytes: int,
        *,
        persistent: bool,
        eviction: EvictionPolicy = "adaptive",
    ) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._tier = tier
        self._persistent = persistent
        self._full_bytes: int | None = None  # all it takes while its medium is full
        self._shares = Shares(eviction)

    # -- looking -------------------------------------------------------------------------------

    def held_bytes(self, tenant: bytes) -> int:
        """What one tenant holds."""
        return self._shares.held_bytes(tenant)

    def fits(self, cost: int) -> bool:
        return self.used_bytes + cost <= self._most_bytes

    def could_fit(self, cost: int) -> bool:
        """Whether so much would fit if nothing else were here."""
        return cost <= self._most_bytes

    @property
    def _most_bytes(self) -> int:
        most = self._full_bytes
        return self.limit_bytes if most is None else min(self.limit_bytes, most)

    def lowest(self, spared: Container[bytes]) -> bytes | None:
        """The key of the block to make room with; it stays until it leaves."""
        return self._shares.lowest(spared)

    def chance(self, block: Block) -> float:
        """That a block is used again, as far as is known."""
        return self._shares.chance(block.tenant, block.key)

    @property
    def duel(self) -> Duel:
        """What is known of blocks like those here, for the next process to go on from."""
        return self._shares.duel

    # -- counting ------------------------------------------------------------------------------

    def use(self, block: Block) -> None:
        """Count a use, which keeps the block longer."""
        self._shares.use(block.tenant, block.key)

    def enter(self, block: Block, size_bytes: int, written: BlockKind | None) -> None:
        """Count a new copy. Of a chain, any part may come first."""
        above = block.parent
        parent = above.key if above is not None and self._tier in above.copies else None
        self._shares.enter(block.tenant, block.key, parent, size_bytes)
        for child in block.children.values():
            if self._tier in child.copies:
                self._shares.adopt(block.tenant, block.key, child.key)
        block.copies[self._tier] = Copy(size_bytes, self._persistent, written)
        self.used_bytes += size_bytes

    def resize(self, block: Block, size_bytes: int) -> None:
        """Count a copy that is here as what it takes now."""
        copy = block.copies[self._tier]
        more_bytes = size_bytes - copy.size_bytes
        self._shares.resize(block.tenant, more_bytes)
        self.used_bytes += more_bytes
        copy.size_bytes = size_bytes

    def leave(self, block: Block) -> bool:
        """Stop counting a copy; False: there is none."""
        copy = block.copies.pop(self._tier, None)
        if copy is None:
            return False
        self.used_bytes -= copy.size_bytes
        self._shares.leave(block.tenant, block.key, copy.size_bytes)
        return True

    # -- a full medium -------------------------------------------------------------------------

    def shrink(self, shortfall_bytes: int) -> None:
        """Take less than now by so much, until the limit is restored: the medium is full."""
        most_bytes = min(self._most_bytes, self.used_bytes)
        self._full_bytes = max(most_bytes - shortfall_bytes, 0)

    def restore_limit(self) -> None:
        self._full_bytes = None
