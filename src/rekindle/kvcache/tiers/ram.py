"""The RAM tier: holds blocks as bytes and never exceeds its budget."""

from __future__ import annotations

from rekindle.kvcache.block import Block, BlockKind
from rekindle.kvcache.tiers.base import Tier
from rekindle.memory import Buffer
from rekindle.protocol.settings import EvictionPolicy
from rekindle.tokens import Tokens

#: Memory of a block's key, node, copies and table entries, and a share of its namespace's root.
OVERHEAD_BYTES = 2176


def cost_bytes(tokens: Tokens, state_bytes: int) -> int:
    """Memory that a block takes."""
    return state_bytes + len(tokens.packed) + OVERHEAD_BYTES


class RamTier(Tier):
    """Holds bytes by key. Everything in it can be used without a read."""

    def __init__(self, limit_bytes: int, eviction: EvictionPolicy = "hit-density") -> None:
        super().__init__("ram", limit_bytes, persistent=False, eviction=eviction)
        self._blobs: dict[bytes, Buffer] = {}

    def cost(self, tokens: Tokens, state_bytes: int) -> int:
        return cost_bytes(tokens, state_bytes)

    def get(self, block: Block) -> Buffer | None:
        return self._blobs.get(block.key)

    def put(self, block: Block, blob: Buffer) -> None:
        cost = cost_bytes(block.tokens, len(blob))
        held = block.copies.get(self.name)
        if not self.budget.fits(cost - (held.size_bytes if held else 0)):
            raise MemoryError("make room before putting")
        if held:
            self.budget.resize(block, cost)
            held.written = block.kind
        else:
            self.budget.add(block, cost, block.kind)
        self._blobs[block.key] = blob

    def remove(self, block: Block, *, quarantine: bool = False) -> None:
        if self.budget.remove(block):
            del self._blobs[block.key]

    def resize(self, block: Block, kind: BlockKind) -> None:
        """Shrink a block to this kind. The bytes of a checkpoint come last, so they are cut off."""
        blob = self._blobs[block.key]
        if len(blob) > kind.size_bytes:
            self.put(block, bytes(blob[: kind.size_bytes]))

    def close(self) -> None:
        """RAM has no resources to release."""
