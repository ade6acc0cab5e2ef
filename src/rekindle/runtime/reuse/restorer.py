"""Restores stored blocks into sequences, and decides whether restoring beats computing.

A turn restores one window of blocks while the next ones are read. The store limits the memory of
fetched blocks, a deadline limits the wait for a tier, and each step restores within its budget.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from math import inf

from rekindle.engine.base import Blob, Engine, Sequence
from rekindle.errors import CorruptBlock, EngineBroken, PoolFull
from rekindle.kvcache.block import Block, WriteBack
from rekindle.kvcache.plan import Plan
from rekindle.kvcache.store import Store
from rekindle.kvcache.tiers.base import Fetch, Tiers
from rekindle.protocol.events import Reason
from rekindle.runtime.device.offload import Counts, StepBudget
from rekindle.runtime.schedule.turn import Restoration

MAX_SAMPLES = 8  # measurements that are kept of each kind
MIN_SAMPLES = 3  # with fewer measurements, the speed counts as unknown
MIN_TRANSFER_BYTES = 16 << 20  # shorter transfers measure latency, not throughput
RETRY_EVERY = 16  # one in this many cut plans is restored whole, to measure again
FETCH_TIMEOUT_S = 10.0  # for one window; afterwards its blocks are computed


class _Fastest:
    """The fastest of the last measurements, in seconds per token or byte.

    The fastest is used so that a short load peak does not change a decision.
    """

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=MAX_SAMPLES)

    def learn(self, count: int, took_s: float) -> None:
        if count > 0 and took_s > 0:
            self._times.append(took_s / count)

    @property
    def known(self) -> float | None:
        return min(self._times) if len(self._times) >= MIN_SAMPLES else None


class CostGate:
    """Decides how many blocks of a plan to restore, from measurements on this machine.

    A small model on a fast device computes a prompt faster than a slow disk reads its state.
    """

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._computing: defaultdict[int, _Fastest] = defaultdict(_Fastest)  # by log2 of the depth
        self._restoring = _Fastest()
        self._reading: defaultdict[str, _Fastest] = defaultdict(_Fastest)  # by tier
        self._cuts = 0  # plans that were cut, or restored whole to measure again

    def learn_computing(self, depth: int, rows: int, took_s: float) -> None:
        """Record a step that computed only `rows` tokens of one prompt, after `depth` tokens."""
        if rows >= 64:  # a smaller step does not show the speed of prefill
            self._computing[depth.bit_length()].learn(rows, took_s)

    def learn_restoring(self, size_bytes: int, took_s: float) -> None:
        if size_bytes >= MIN_TRANSFER_BYTES:
            self._restoring.learn(size_bytes, took_s)

    def learn_reading(self, tier: str, size_bytes: int, took_s: float) -> None:
        """Record a transfer from a lower tier into memory."""
        if size_bytes >= MIN_TRANSFER_BYTES:
            self._reading[tier].learn(size_bytes, took_s)

    def apply(self, plan: Plan[Sequence], *, may_cut: bool) -> Plan[Sequence]:
        """Remove the blocks at the end of the plan that are faster to compute.

        `may_cut=False` allows only to remove all blocks or none.
        """
        count = self._worthwhile(plan.blocks, may_cut=may_cut)
        if count == len(plan.blocks):
            return plan
        self._cuts += 1
        if self._cuts % RETRY_EVERY == 0:
            return plan
        blocks = plan.blocks[:count]
        reused = blocks[-1].stop if blocks else plan.shared_tokens
        return replace(plan, blocks=blocks, reused_tokens=reused, is_cut=True)

    def _worthwhile(self, blocks: Seq[Block], *, may_cut: bool) -> int:
        """Number of blocks to restore so that the total time is shortest."""
        min_gain_s = 0.2  # a smaller gain is not worth computing again
        byte_s = {tier.name: self._byte_s(tier.name) for tier in self._tiers}
        if sum(block.size_bytes for block in blocks) * max(byte_s.values()) < min_gain_s:
            return len(blocks)
        # Time saved by computing all blocks from each position on, instead of restoring them.
        saved_s, best, best_s = 0.0, len(blocks), min_gain_s
        for at in range(len(blocks) - 1, -1, -1):
            block = blocks[at]
            compute_s = len(block.tokens) * self._token_s(block.stop)
            saved_s += block.size_bytes * byte_s[self._tiers.source(block).name] - compute_s
            if saved_s > best_s and (may_cut or not at):
                best, best_s = at, saved_s
        return best

    def _token_s(self, depth: int) -> float:
        """Time to compute a token, measured at the nearest depth; infinite if unknown."""
        bits = depth.bit_length()
        known = ((abs(each - bits), time.known) for each, time in self._computing.items())
        return min(((far, time) for far, time in known if time), default=(0, inf))[1]

    def _byte_s(self, tier: str) -> float:
        """Time to restore a byte; zero if unknown.

        A window is restored while the next one is read, so the slower of the two counts.
        """
        return max(self._restoring.known or 0.0, self._reading[tier].known or 0.0)


@dataclass(frozen=True, slots=True)
class Restorer:
    """Restores the blocks of a plan up to the first that is unavailable. The rest is computed."""

    engine: Engine
    store: Store
    counts: Counts
    budget: StepBudget
    cost_gate: CostGate
    now_s: Callable[[], float]

    def begin(self, plan: Plan[Sequence]) -> Restoration:
        if any(self.store.get(block) is None for block in plan.blocks):
            self.store.use(plan.blocks)  # so that they are not evicted meanwhile
        return Restoration(plan)

    def wait_s(self, restoration: Restoration) -> float | None:
        """Time left for a tier to answer, or None if no tier is being waited for."""
        since_s = restoration.waits_since_s
        return None if since_s is None else max(since_s + FETCH_TIMEOUT_S - self.now_s(), 0.0)

    def advance(self, restoration: Restoration, sequence: Sequence) -> bool:
        """Append available blocks within the step's budget.

        Returns True when it has ended: all blocks are restored, or the next one is unavailable.
        """
        while rest := restoration.rest:
            if self.budget.is_spent:
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
            restoration.problem = None  # a failed block was found in another tier
        self.release(restoration)
        return True

    def _blob(self, block: Block, restoration: Restoration) -> Blob | None:
        blob = self.store.get(block)
        if blob is not None:
            return blob
        window = restoration.window_of(block)  # the first tier had no room for it
        return window.blob(block) if window is not None and window.is_done else None

    def _is_coming(self, block: Block, restoration: Restoration) -> bool:
        """Whether the block is being read or will be. False: it has to be computed."""
        window = restoration.window_of(block)
        if window is not None and window.is_done and block.key not in window.bad:
            return False  # its copy is intact, but it was not read or was replaced
        if window is not None and window.is_done:
            self._drop(window, restoration, Reason.CORRUPT)
        elif window is not None and self._is_late(restoration):
            self.store.fetches.give_up(window)
            self._drop(window, restoration, Reason.FETCH_TIMEOUT)
        elif window is not None:
            return True
        return self._start(block, restoration)

    def _start(self, block: Block, restoration: Restoration) -> bool:
        """Start reading a block. Returns False if no working tier has it."""
        if not self.store.is_readable(block):
            if self.store.knows(block.key) and restoration.problem is None:
                restoration.problem = Reason.FETCH_TIMEOUT
            return False
        window = self.store.fetches.start(restoration.unclaimed)
        while window is None and restoration.fetches:  # later windows must not block this one
            self.store.fetches.release(restoration.fetches.pop())
            window = self.store.fetches.start(restoration.unclaimed)
        if window:
            now_s = restoration.waits_since_s = self.now_s()
            if not restoration.fetches:
                restoration.reads_since_s, restoration.read_bytes = now_s, 0
            restoration.fetches.insert(0, window)
            self._read_ahead(restoration)
            return True
        abandoned = self.store.fetches.abandoned(block)  # otherwise other turns release the memory
        restoration.waits_since_s = restoration.waits_since_s if abandoned else None
        if not abandoned or not self._is_late(restoration):
            return True
        for window in abandoned:
            self.store.fetches.give_up(window)
        restoration.problem = Reason.FETCH_TIMEOUT
        return False

    def _is_late(self, restoration: Restoration) -> bool:
        if restoration.waits_since_s is None:
            restoration.waits_since_s = self.now_s()
        return self.wait_s(restoration) == 0.0

    def _read_ahead(self, restoration: Restoration) -> None:
        """Read the next windows while this one is restored, within the turn's share of memory."""
        held_bytes = sum(window.size_bytes for window in restoration.fetches)
        while restoration.fetches and held_bytes < self.store.fetches.turn_bytes:
            window = self.store.fetches.read_ahead(restoration.unread)
            if window is None:
                return
            restoration.fetches.append(window)
            held_bytes += window.size_bytes

    def _count(self, block: Block, restoration: Restoration) -> None:
        """Record a restored block, and drop its window after the last one."""
        restoration.restored += 1
        restoration.waits_since_s = None
        window = restoration.window_of(block)
        restoration.tiers.add(window.tier if window else self.store.tiers[0].name)
        if window is not None and block.key == next(reversed(window.blocks)):
            restoration.read_bytes += window.size_bytes
            self._drop(window, restoration, restoration.problem)
            self._read_ahead(restoration)
            if not restoration.fetches:
                # Windows are read in parallel and while others are restored, so only the total
                # time shows the speed of the tier.
                took_s = self.now_s() - restoration.reads_since_s
                self.cost_gate.learn_reading(window.tier, restoration.read_bytes, took_s)

    def _drop(self, window: Fetch, restoration: Restoration, problem: Reason | None) -> None:
        restoration.fetches.remove(window)
        restoration.waits_since_s = None
        restoration.problem = problem
        self.store.fetches.release(window)

    def release(self, restoration: Restoration) -> None:
        """Release all windows. The store may keep blocks that have arrived."""
        for window in restoration.fetches:
            self.store.fetches.release(window)
        restoration.fetches.clear()
        restoration.waits_since_s = None

    def _append(self, sequence: Sequence, block: Block, blob: Blob, *, is_last: bool) -> bool:
        """Append a block. Only the checkpoint of the last block is restored."""
        resumable = is_last and not self.engine.capabilities.can_truncate
        if block.resumable and not resumable:
            layout = self.engine.capabilities.kv[sequence.kv_type]
            blob = memoryview(blob)[: layout.cells_bytes(len(block.tokens))]
        started_s = self.now_s()
        try:
            self.engine.sequences.restore(sequence, blob, len(block.tokens), resumable=resumable)
        except PoolFull:
            return False
        except CorruptBlock:
            self.store.drop(block)
            return False
        except EngineBroken:
            self.store.drop(block)  # otherwise the next turn would break the engine again
            raise
        self.counts.restored_bytes += len(blob)
        self.cost_gate.learn_restoring(len(blob), self.now_s() - started_s)
        return True

    def count_use(self, restoration: Restoration, write_back: WriteBack) -> None:
        """Record the use of the restored blocks, and apply the turn's write-back policy to them."""
        restored = restoration.plan.blocks[: restoration.restored]
        whole = [each for each in restored if each.stop <= restoration.plan.reused_tokens]
        self.store.use(whole, write_back)
        self.store.use(restored[len(whole) :])  # the conversation uses only part of it
