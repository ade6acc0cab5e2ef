"""Stored state into the engine: blocks fetched from lower tiers a window at a time, then restored.

A turn restores one window while the next ones are read. What waits in memory is bounded by the
store, how long a turn waits by a deadline, and how much one step restores by its budget.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from math import inf

from rekindle.engine.base import Blob, Engine, Sequence
from rekindle.engine.base import Sequence as EngineSequence
from rekindle.errors import CorruptBlock, EngineBroken, PoolFull
from rekindle.kvcache.block import Block, WriteBack
from rekindle.kvcache.plan import Plan
from rekindle.kvcache.store import Store
from rekindle.kvcache.tiered import Tiers
from rekindle.kvcache.tiers.base import Fetch
from rekindle.protocol.events import Reason
from rekindle.runtime.device.offload import Counts, StepBudget
from rekindle.runtime.schedule.turn import Restoration

# ----------------------------------------------------------------------
# Restoring must beat computing: decided for each request by what this machine has shown.
#
# A small model on a fast device computes a prompt sooner than a slow disk brings it. What is known
# of the two are the fastest of the last few times, so that a moment's load decides nothing.

LAST_TIMES = 8  # that are remembered of each kind
LEAST_TIMES = 3  # with fewer nothing is known
LEAST_ROWS = 64  # of a step that shows how fast prompts are computed
LEAST_BYTES = 16 << 20  # of a transfer that shows how fast tiers are: short ones show latencies
LEAST_GAIN_S = 0.2  # for less nothing is computed again
TRIED_AGAIN = 16  # of so many plans that would be cut one is not: it may pay by now


class _Fastest:
    """Seconds a token or a byte."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=LAST_TIMES)

    def learn(self, count: int, took_s: float) -> None:
        if count > 0 and took_s > 0:
            self._times.append(took_s / count)

    @property
    def known(self) -> float | None:
        return min(self._times) if len(self._times) >= LEAST_TIMES else None


class CostGate:
    """How many of a plan's blocks are worth being restored."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._computing: dict[int, _Fastest] = {}  # by the bits of the depth: it slows down with it
        self._restoring = _Fastest()
        self._reading: dict[str, _Fastest] = {}  # by tier
        self._cuts = 0  # that would have been made

    def learn_computing(self, depth: int, rows: int, took_s: float) -> None:
        """A step has computed so many rows of one prompt, and no more, after so many tokens."""
        if rows >= LEAST_ROWS:
            self._computing.setdefault(depth.bit_length(), _Fastest()).learn(rows, took_s)

    def learn_restoring(self, size_bytes: int, took_s: float) -> None:
        if size_bytes >= LEAST_BYTES:
            self._restoring.learn(size_bytes, took_s)

    def learn_reading(self, tier: str, size_bytes: int, took_s: float) -> None:
        """A lower tier has brought so much into memory."""
        if size_bytes >= LEAST_BYTES:
            self._reading.setdefault(tier, _Fastest()).learn(size_bytes, took_s)

    def apply(self, plan: Plan[EngineSequence], *, may_cut: bool) -> Plan[EngineSequence]:
        """The plan, without blocks at its end whose tokens are sooner computed; all of them where
        it may not be cut between two."""
        count = self._worth(plan.blocks, may_cut=may_cut)
        if count == len(plan.blocks):
            return plan
        self._cuts += 1
        if self._cuts % TRIED_AGAIN == 0:
            return plan
        blocks = plan.blocks[:count]
        reused = blocks[-1].stop if blocks else plan.shared_tokens
        return replace(plan, blocks=blocks, reused_tokens=reused, is_cut=True)

    def _worth(self, blocks: Seq[Block], *, may_cut: bool) -> int:
        """How many, from the first on, leave least to be done."""
        byte_s = {tier.name: self._byte_s(tier.name) for tier in self._tiers}
        most_s = sum(block.size_bytes for block in blocks) * max(byte_s.values())
        if most_s < LEAST_GAIN_S:
            return len(blocks)
        # What is saved by computing, not restoring, all from each place on.
        saved_s, best, best_s = 0.0, len(blocks), LEAST_GAIN_S
        for at in range(len(blocks) - 1, -1, -1):
            block = blocks[at]
            compute_s = len(block.tokens) * self._token_s(block.stop)
            saved_s += block.size_bytes * byte_s[self._source(block)] - compute_s
            if saved_s > best_s and (may_cut or not at):
                best, best_s = at, saved_s
        return best

    def _source(self, block: Block) -> str:
        return self._tiers.source(block).name

    def _token_s(self, depth: int) -> float:
        """That computing takes, by the nearest depth that is known; if none is, for ever."""
        bits = depth.bit_length()
        known = ((abs(each - bits), time.known) for each, time in self._computing.items())
        return min(((far, time) for far, time in known if time), default=(0, inf))[1]

    def _byte_s(self, tier: str) -> float:
        """That restoring takes; not known, it takes no time. A window is restored while the next is
        read, so that the slower of the two counts."""
        restoring = self._restoring.known or 0.0
        reading = self._reading[tier].known if tier in self._reading else None
        return max(restoring, reading or 0.0)


FETCH_TIMEOUT_S = 10.0  # for one window; then what it holds is computed

NowS = Callable[[], float]


class Restorer:
    """Restores as much of a plan as can be; what cannot is computed."""

    def __init__(
        self,
        engine: Engine,
        store: Store,
        counts: Counts,
        budget: StepBudget,
        cost_gate: CostGate,
        now_s: NowS,
    ) -> None:
        self._engine = engine
        self._store = store
        self._fetches = store.fetches
        self._counts = counts
        self._budget = budget
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
        """Append blocks that are at hand, within the step's budget; True when it is over: all
        are restored, or the next cannot be."""
        while rest := restoration.rest:
            if self._budget.is_spent:
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
            self._engine.sequences.restore(sequence, blob, len(block.tokens), resumable=resumable)
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
