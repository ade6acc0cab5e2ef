"""How far a turn's stored state has got on its way into the engine."""

from __future__ import annotations

from itertools import dropwhile, takewhile

from rekindle.engine.base import Sequence
from rekindle.kvcache.block import Block
from rekindle.kvcache.plan import Plan
from rekindle.kvcache.tiers.base import Fetch
from rekindle.protocol.events import Reason


class Restoration:
    """The blocks of a plan: those in the sequence, those being read, and the rest."""

    __slots__ = (
        "blocks",
        "fetches",
        "plan",
        "problem",
        "read_bytes",
        "reads_since_s",
        "restored",
        "tiers",
        "waits_since_s",
    )

    def __init__(self, plan: Plan[Sequence]) -> None:
        self.plan = plan
        self.blocks = plan.blocks
        self.restored = 0  # of the blocks, the first so many
        self.fetches: list[Fetch] = []  # windows that hold what comes next
        self.tiers: set[str] = set()  # that gave something
        self.waits_since_s: float | None = None  # for a tier
        self.reads_since_s = 0.0  # without a break
        self.read_bytes = 0  # that have come since then
        self.problem: Reason | None = None  # why it ended early

    @property
    def rest(self) -> tuple[Block, ...]:
        return self.blocks[self.restored :]

    @property
    def unclaimed(self) -> tuple[Block, ...]:
        """What comes before the first window."""
        return tuple(takewhile(lambda block: self.window_of(block) is None, self.rest))

    @property
    def unread(self) -> tuple[Block, ...]:
        """What comes after all windows."""
        if not self.fetches:
            return self.rest
        last = next(reversed(self.fetches[-1].blocks))
        behind = dropwhile(lambda block: block.key != last, self.rest)
        return tuple(behind)[1:]

    def window_of(self, block: Block) -> Fetch | None:
        return next((fetch for fetch in self.fetches if block.key in fetch.blocks), None)
