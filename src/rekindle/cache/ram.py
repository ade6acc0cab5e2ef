"""The RAM tier: blocks as bytes, under a budget that is really kept."""

from __future__ import annotations

from collections.abc import Mapping

OVERHEAD_BYTES = 1536  # a block's key, node and table entries, and a share of its namespace's root


def cost_bytes(blob: bytes, packed: bytes) -> int:
    """What keeping a block really takes."""
    return len(blob) + len(packed) + OVERHEAD_BYTES


class RamTier:
    """Holds bytes by key. Whoever puts makes room first: the tier refuses to outgrow its limit."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._blobs: dict[bytes, tuple[bytes, int]] = {}

    def fits(self, cost: int) -> bool:
        return self.used_bytes + cost <= self.limit_bytes

    def put(self, key: bytes, blob: bytes, cost: int) -> None:
        _, freed = self._blobs.get(key, (b"", 0))
        if not self.fits(cost - freed):
            raise MemoryError("make room before putting")
        self.drop(key)
        self._blobs[key] = (blob, cost)
        self.used_bytes += cost

    def get(self, key: bytes) -> bytes | None:
        held = self._blobs.get(key)
        return held[0] if held else None

    def drop(self, key: bytes) -> None:
        if held := self._blobs.pop(key, None):
            self.used_bytes -= held[1]  # the only line that subtracts

    def sizes(self) -> Mapping[bytes, int]:
        return {key: len(blob) for key, (blob, _) in self._blobs.items()}
