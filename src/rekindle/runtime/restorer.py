"""Stored state into the engine: blocks fetched from lower tiers a window at a time, then restored.

A turn restores one window while the next ones are read. What waits in memory is bounded by the
store, how long a turn waits by a deadline, and how much one step restores by its allowance.
"""

from __future__ import annotations

from collections.abc import Callable

from rekindle.engine.base import Blob, Engine, Sequence
from rekindle.errors import CorruptBlock, EngineBroken, PoolFull
from rekindle.kvcache.block import Block, WriteBack
from rekindle.kvcache.plan import Plan
from rekindle.kvcache.store import Store
from rekindle.kvcache.tiers.base import Fetch
from rekindle.protocol.events import Reason
from rekindle.runtime.cost_gate import CostGate
from rekindle.runtime.offload import Allowance, Counts
from rekindle.runtime.restoration import Restoration

FETCH_TIMEOUT_S = 10.0  # for one window; then what it holds is computed

NowS = Callable[[], float]


class Restorer:
    """Restores as much of a plan as can be; what cannot is computed."""

    def __init__(
        self,
        engine: Engine,
        store: Store,
        counts: Counts,
        allowance: Allowance,
        cost_gate: CostGate,
        now_s: NowS,
    ) -> None:
        self._engine = engine
        self._store = store
        self._fetches = store.fetches
        self._counts = counts
        self._allowance = allowance
        self._cost_gate = cost_gate
        self._now_s = now_s
        self._can_truncate = engine.capabilities.can_truncate

    def begin(self, plan: Plan[Sequence]) -> Restoration:
        if any(self._store.get(block) is None for block in plan.blocks):
            self._store.use(plan.blocks)  # or what is kept meanwhile might take their place
        return Restoration(plan)

    def wait_s(self, restoration: Restoration) -> float | None:
        """How long a tier still has to answer; None: nobody waits for it."""
        since_s = restoration.waits_since_s
        return None if since_s is None else max(since_s + FETCH_TIMEOUT_S - self._now_s(), 0.0)

    def advance(self, restoration: Restoration, sequence: Sequence) -> bool:
        """Append blocks that are at hand, within the step's allowance; True when it is over: all
        are restored, or the next cannot be."""
        while rest := restoration.rest:
            if self._allowance.is_spent:
                return False
            block, is_last = rest[0], len(rest) == 1
            blob = self._blob(block, restoration)
            if blob is None:
                if self._is_coming(block, restoration):
                    return False
                break
            if not self._append(sequence, block, blob, is_last=is_last):
                break
            self._count(block, restoration)
        else:
            restoration.problem = None  # another tier had it
        self.release(restoration)
        return True

    def _blob(self, block: Block, restoration: Restoration) -> Blob | None:
        blob = self._store.get(block)
        if blob is not None:
            return blob
        window = restoration.window_of(block)  # the first tier had no room to keep it
        return window.blob(block) if window is not None and window.is_done else None

    def _is_coming(self, block: Block, restoration: Restoration) -> bool:
        """Whether to wait for a block: it is being read, or will be; False: it is computed."""
        window = restoration.window_of(block)
        if window is not None and window.is_done and block.key not in window.bad:
            return False  # missed for no fault of its copy, or it was replaced meanwhile
        if window is not None and window.is_done:
            self._drop(window, restoration, Reason.CORRUPT)
        elif window is not None and self._is_late(restoration):
            self._fetches.give_up(window)
            self._drop(window, restoration, Reason.FETCH_TIMEOUT)
        elif window is not None:
            return True
        return self._start(block, restoration)

    def _start(self, block: Block, restoration: Restoration) -> bool:
        """Have a block read; False: no tier that answers has it."""
        if not self._store.is_readable(block):
            if self._store.knows(block.key) and restoration.problem is None:
                restoration.problem = Reason.FETCH_TIMEOUT
            return False
        window = self._fetches.start(restoration.unclaimed)
        while window is None and restoration.fetches:  # what comes later must not keep it out
            self._fetches.release(restoration.fetches.pop())
            window = self._fetches.start(restoration.unclaimed)
        if window:
            now_s = restoration.waits_since_s = self._now_s()
            if not restoration.fetches:
                restoration.reads_since_s, restoration.read_bytes = now_s, 0
            restoration.fetches.insert(0, window)
            self._read_ahead(restoration)
            return True
        abandoned = self._fetches.abandoned(block)  # else others look after what takes the room
        restoration.waits_since_s = restoration.waits_since_s if abandoned else None
        if not abandoned or not self._is_late(restoration):
            return True
        for window in abandoned:
            self._fetches.give_up(window)
        restoration.problem = Reason.FETCH_TIMEOUT
        return False

    def _is_late(self, restoration: Restoration) -> bool:
        if restoration.waits_since_s is None:
            restoration.waits_since_s = self._now_s()
        return self.wait_s(restoration) == 0.0

    def _read_ahead(self, restoration: Restoration) -> None:
        """Have what comes next read while this is restored, as far as a turn's share goes."""
        held_bytes = sum(window.size_bytes for window in restoration.fetches)
        while restoration.fetches and held_bytes < self._fetches.turn_bytes:
            window = self._fetches.start(restoration.unread)
            if window is None:
                return
            restoration.fetches.append(window)
            held_bytes += window.size_bytes

    def _count(self, block: Block, restoration: Restoration) -> None:
        """A block is restored; a window whose last it was is not needed any more."""
        restoration.restored += 1
        restoration.waits_since_s = None
        window = restoration.window_of(block)
        restoration.tiers.add(window.tier if window else self._store.tiers[0].name)
        if window is not None and block.key == next(reversed(window.blocks)):
            restoration.read_bytes += window.size_bytes
            self._drop(window, restoration, restoration.problem)
            self._read_ahead(restoration)
            if not restoration.fetches:
                self._learn_reading(window.tier, restoration)

    def _learn_reading(self, tier: str, restoration: Restoration) -> None:
        """All that a tier was asked for is restored. Windows are read beside one another, and while
        others are restored: what any one of them took says nothing."""
        took_s = self._now_s() - restoration.reads_since_s
        self._cost_gate.learn_reading(tier, restoration.read_bytes, took_s)

    def _drop(self, window: Fetch, restoration: Restoration, problem: Reason | None) -> None:
        restoration.fetches.remove(window)
        restoration.waits_since_s = None
        restoration.problem = problem
        self._fetches.release(window)

    def release(self, restoration: Restoration) -> None:
        """Let go of what is on its way; what has arrived may be kept by the store."""
        for window in restoration.fetches:
            self._fetches.release(window)
        restoration.fetches.clear()
        restoration.waits_since_s = None

    def _append(self, sequence: Sequence, block: Block, blob: Blob, *, is_last: bool) -> bool:
        """Append a block; the checkpoint it may have is of use only in the last one."""
        resumable = is_last and not self._can_truncate
        if block.resumable and not resumable:
            layout = self._engine.capabilities.kv[sequence.kv_type]
            blob = memoryview(blob)[: layout.cells_bytes(len(block.tokens))]
        started_s = self._now_s()
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
        self._cost_gate.learn_restoring(len(blob), self._now_s() - started_s)
        return True

    def count_use(self, restoration: Restoration, write_back: WriteBack) -> None:
        """Of what was restored; a turn that wants it kept longer has it kept longer."""
        restored = restoration.blocks[: restoration.restored]
        whole = [each for each in restored if each.stop <= restoration.plan.reused_tokens]
        self._store.use(whole, write_back)
        self._store.use(restored[len(whole) :])  # only its beginning is this conversation's
