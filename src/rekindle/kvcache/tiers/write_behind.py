"""A tier that writes behind: a block counts when it is put and is written later, by others."""

from __future__ import annotations

from abc import ABC, abstractmethod

from rekindle.kvcache.block import Block, BlockKind
from rekindle.kvcache.codec import Record, record_bytes
from rekindle.kvcache.tiers.base import BaseTier, Blob, Write, WriteFailed, Written
from rekindle.protocol.settings import EvictionPolicy
from rekindle.tokens import Tokens


class WriteBehindTier(BaseTier, ABC):
    """Holds what is not yet written, so that it can be had and overtaken until it is."""

    def __init__(
        self,
        name: str,
        limit_bytes: int,
        queue_bytes: int,
        eviction: EvictionPolicy = "adaptive",
    ) -> None:
        super().__init__(name, limit_bytes, persistent=True, eviction=eviction)
        self.queue_bytes = queue_bytes
        self._pending: dict[bytes, Write] = {}  # asked for, not yet done

    @abstractmethod
    def cost(self, tokens: Tokens, state_bytes: int) -> int: ...

    @abstractmethod
    def _write(self, write: Write) -> None:
        """Have a block written; `Written` or `WriteFailed` follows."""

    @abstractmethod
    def _delete(self, key: bytes, *, quarantine: bool) -> None:
        """Have a block deleted, after what was asked for before."""

    @property
    def has_queue_room(self) -> bool:
        return self.pending_bytes < self.queue_bytes

    def adopt(self, block: Block, kind: BlockKind) -> None:
        self.budget.enter(block, self.cost(block.tokens, kind.size_bytes), kind)

    def get(self, block: Block) -> Blob | None:
        """The bytes of a block that is still waiting to be written."""
        write = self._pending.get(block.key)
        return write.record.blob if write else None

    def put(self, block: Block, blob: Blob) -> None:
        """Have a block written; until then the copy that is there stands."""
        assert block.parent is not None
        cost = self.cost(block.tokens, len(blob))
        if self.holds(block):
            self.budget.resize(block, cost)
        else:
            self.budget.enter(block, cost, None)
        record = Record(
            block.namespace, block.parent.key, block.tokens, blob, block.exact, block.resumable
        )
        self._forget_pending(block.key)
        size_bytes = record_bytes(len(block.tokens.packed), len(blob))
        write = self._pending[block.key] = Write(block.key, record, size_bytes)
        self.pending_bytes += len(blob)
        self._write(write)

    def remove(self, block: Block, *, quarantine: bool = False) -> None:
        if self.budget.leave(block):
            self._forget_pending(block.key)
            self._delete(block.key, quarantine=quarantine)

    def discard(self, key: bytes) -> None:
        self._delete(key, quarantine=False)

    def resize(self, block: Block, kind: BlockKind) -> None:
        self.budget.resize(block, self.cost(block.tokens, kind.size_bytes))

    def complete(self, event: Written | WriteFailed) -> list[Write]:
        done = [write for write in event.writes if self._pending.get(write.key) is write]
        for write in done:
            self._forget_pending(write.key)
        if isinstance(event, Written):
            self.counts.written_bytes += sum(write.size_bytes for write in event.writes)
        return done

    def _forget_pending(self, key: bytes) -> None:
        if write := self._pending.pop(key, None):
            self.pending_bytes -= len(write.record.blob)
