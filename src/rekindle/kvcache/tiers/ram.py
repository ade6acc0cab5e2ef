"""The RAM tier: blocks as bytes, under a budget that is really kept."""

from __future__ import annotations

from collections.abc import Container

from rekindle.kvcache.block import Block
from rekindle.kvcache.policy import Shares

OVERHEAD_BYTES = 1536  # a block's key, node and table entries, and a share of its namespace's root

Blob = bytes | bytearray | memoryview


def cost_bytes(blob: Blob, packed: bytes) -> int:
    """What keeping a block really takes."""
    return len(blob) + len(packed) + OVERHEAD_BYTES


class RamTier:
    """Holds bytes by key. Whoever puts makes room first: the tier refuses to outgrow its limit."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._blobs: dict[bytes, tuple[Blob, int]] = {}
        self._shares = Shares()

    def __contains__(self, block: Block) -> bool:
        return block.key in self._blobs

    def held_bytes(self, root: bytes) -> int:
        """What one tenant holds."""
        return self._shares.held_bytes(root)

    def fits(self, cost: int) -> bool:
        return self.used_bytes + cost <= self.limit_bytes

    def put(self, block: Block, blob: Blob) -> None:
        """Hold a block's bytes, in place of those it had."""
        _, freed = self._blobs.get(block.key, (b"", 0))
        cost = cost_bytes(blob, block.packed)
        if not self.fits(cost - freed):
            raise MemoryError("make room before putting")
        if block.key in self._blobs:
            self._shares.resize(block.root, cost - freed)
        else:
            above = block.parent
            parent = above.key if above is not None and above in self else None
            self._shares.enter(block.root, block.key, parent, cost)
            for child in block.children.values():
                if child in self:
                    self._shares.adopt(block.root, block.key, child.key)
        self._blobs[block.key] = (blob, cost)
        self.used_bytes += cost - freed

    def get(self, block: Block) -> Blob | None:
        held = self._blobs.get(block.key)
        return held[0] if held else None

    def cost(self, block: Block) -> int:
        held = self._blobs.get(block.key)
        return held[1] if held else 0

    def use(self, block: Block) -> None:
        self._shares.use(block.root, block.key)

    def lowest(self, spared: Container[bytes]) -> bytes | None:
        """The key to make room with."""
        return self._shares.lowest(spared)

    def drop(self, block: Block) -> None:
        """Let go of the bytes of a block that has no child here."""
        if held := self._blobs.pop(block.key, None):
            self.used_bytes -= held[1]
            self._shares.leave(block.root, block.key, held[1])
