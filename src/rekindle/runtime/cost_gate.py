"""Restoring must beat computing: decided for each request by what this machine has shown.

A small model on a fast device computes a prompt sooner than a slow disk brings it. What is known of
the two are the fastest of the last few times, so that a moment's load decides nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from math import inf

from rekindle.engine.base import Sequence as EngineSequence
from rekindle.kvcache.block import Block
from rekindle.kvcache.plan import Plan
from rekindle.kvcache.tiered import Tiers

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

    def _worth(self, blocks: Sequence[Block], *, may_cut: bool) -> int:
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
