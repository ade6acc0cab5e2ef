"""The RAM tier: blocks as bytes, under a budget that is really kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rekindle.kvcache.block import Block, BlockKind
from rekindle.kvcache.tiers.base import (
    BaseTier,
    Blob,
    Fetch,
    StoredBlock,
    Write,
    WriteFailed,
    Written,
)
from rekindle.protocol.settings import EvictionPolicy
from rekindle.tokens import Tokens

OVERHEAD_BYTES = (
    2176  # a block's key, node, copies and table entries, and a share of its namespace's root
)


def cost_bytes(tokens: Tokens, state_bytes: int) -> int:
    """What keeping a block really takes."""
    return state_bytes + len(tokens.packed) + OVERHEAD_BYTES


class RamTier(BaseTier):
    """Holds bytes by key; all that it holds is at hand. It refuses to outgrow its limit."""

    def __init__(self, limit_bytes: int, eviction: EvictionPolicy = "hit-density") -> None:
        super().__init__("ram", limit_bytes, persistent=False, eviction=eviction)
        self._blobs: dict[bytes, Blob] = {}

    @property
    def has_queue_room(self) -> bool:
        return True  # nothing waits

    def cost(self, tokens: Tokens, state_bytes: int) -> int:
        return cost_bytes(tokens, state_bytes)

    def get(self, block: Block) -> Blob | None:
        return self._blobs.get(block.key)

    def put(self, block: Block, blob: Blob) -> None:
        cost = cost_bytes(block.tokens, len(blob))
        held = block.copies.get(self.name)
        if not self.budget.fits(cost - (held.size_bytes if held else 0)):
            raise MemoryError("make room before putting")
        if held:
            self.budget.resize(block, cost)
            held.written = block.kind
        else:
            self.budget.enter(block, cost, block.kind)
        self._blobs[block.key] = blob

    def remove(self, block: Block, *, quarantine: bool = False) -> None:
        if self.budget.leave(block):
            del self._blobs[block.key]

    def resize(self, block: Block, kind: BlockKind) -> None:
        """Leave off what comes after this kind's state."""
        blob = self._blobs[block.key]
        if len(blob) > kind.size_bytes:
            self.put(block, bytes(blob[: kind.size_bytes]))

    def read(self, blocks: Sequence[Block], fetch: Fetch) -> None:
        raise NotImplementedError("all that RAM holds is at hand")

    def complete(self, event: Written | WriteFailed) -> list[Write]:
        return []

    def flush(self, then: Callable[[bool], None]) -> None:
        then(True)

    def stored(self) -> Iterable[StoredBlock]:
        return ()

    def adopt(self, block: Block, kind: BlockKind) -> None:
        raise NotImplementedError("RAM holds nothing when it is opened")

    def discard(self, key: bytes) -> None:
        """It held nothing."""

    def close(self) -> None:
        """It has no resources."""
