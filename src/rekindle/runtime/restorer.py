"""Stored state into the engine: blocks fetched from lower tiers, then restored in order."""

from __future__ import annotations

from rekindle.engine.base import Blob, Engine, Sequence
from rekindle.errors import CorruptBlock, EngineBroken, PoolFull
from rekindle.kvcache.block import Block
from rekindle.kvcache.plan import Plan
from rekindle.kvcache.store import Store
from rekindle.runtime.offload import Counts
from rekindle.runtime.turn import Turn


class Restorer:
    """Restores as much of a plan as can be; what cannot is computed."""

    def __init__(self, engine: Engine, store: Store, counts: Counts) -> None:
        self._engine = engine
        self._store = store
        self._counts = counts
        self._can_truncate = engine.capabilities.can_truncate
        self._checkpoint_bytes = engine.capabilities.kv_layout.checkpoint_bytes

    def fetch(self, turn: Turn, plan: Plan[Sequence]) -> bool:
        """Start fetching what the plan needs from lower tiers; False when all is at hand."""
        if self._is_to_fetch(turn, plan):
            turn.fetch = self._store.fetch(plan.blocks)
            if turn.is_fetching:
                self._store.use(plan.blocks)  # or what is kept meanwhile might take their place
        return turn.is_fetching

    def _is_to_fetch(self, turn: Turn, plan: Plan[Sequence]) -> bool:
        """Once; and again when a bad block has left another way to go on."""
        if turn.fetch is None:
            return True
        if not turn.fetch.bad:
            return False
        turn.is_damaged = True
        return any(self._blob(block, turn) is None for block in plan.blocks)

    def restore(self, plan: Plan[Sequence], sequence: Sequence, turn: Turn) -> str | None:
        """Append the plan's blocks up to the first that cannot be; the slowest tier that gave
        one, None when none did."""
        restored = self._restore_blocks(plan, sequence, turn)
        tier = self._slowest_source(restored, turn) if restored else None
        if turn.fetch is not None:
            turn.is_damaged |= bool(turn.fetch.bad)
            turn.fetch.records.clear()  # the bytes are in place, or in RAM, or not needed
        whole = [block for block in restored if block.stop <= plan.reused_tokens]
        self._store.use(whole, turn.lookup.write_back)
        self._store.use(restored[len(whole) :])  # only its beginning is this conversation's
        return tier

    def _restore_blocks(self, plan: Plan[Sequence], sequence: Sequence, turn: Turn) -> list[Block]:
        restored = []
        for block in plan.blocks:
            blob = self._blob(block, turn)
            is_last = block is plan.blocks[-1]
            if blob is None or not self._append(sequence, block, blob, is_last=is_last):
                break
            restored.append(block)
        return restored

    def _slowest_source(self, restored: list[Block], turn: Turn) -> str | None:
        """The tier that the slowest of these blocks came from."""
        fetched = turn.fetch.sources if turn.fetch else {}
        read = turn.fetch.records if turn.fetch else {}
        names = (fetched[each.key] for each in restored if each.key in read)
        return self._store.tiers.slower(self._store.tiers[0].name, *names)

    def _blob(self, block: Block, turn: Turn) -> Blob | None:
        blob = self._store.get(block)
        if blob is not None or turn.fetch is None:
            return blob
        return turn.fetch.blob(block)  # the first tier had no room to keep it

    def _append(self, sequence: Sequence, block: Block, blob: Blob, *, is_last: bool) -> bool:
        """Append a block; the checkpoint it may have is of use only in the last one."""
        resumable = is_last and not self._can_truncate
        if block.resumable and not resumable:
            blob = memoryview(blob)[: -self._checkpoint_bytes]
        try:
            self._engine.restore(sequence, blob, len(block.tokens), resumable=resumable)
        except PoolFull:
            return False
        except CorruptBlock:
            self._store.drop(block)
            return False
        except EngineBroken:
            self._store.drop(block)  # or the next turn would break it again
            raise
        self._counts.restored_bytes += len(blob)
        return True
