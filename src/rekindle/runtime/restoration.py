"""How far a turn's stored state has got on its way into the engine."""

from __future__ import annotations

from rekindle.engine.base import Sequence
from rekindle.kvcache.block import Block
from rekindle.kvcache.plan import Plan
from rekindle.kvcache.tiers.base import Fetch
from rekindle.protocol.events import Reason


class Restoration:
    """The blocks of a plan: those in the sequence, those being read, and the rest."""

    __slots__ = ("blocks", "fetches", "plan", "problem", "restored", "tiers", "waits_since_s")

    def __init__(self, plan: Plan[Sequence]) -> None:
        self.plan = plan
        self.blocks = plan.blocks
        self.restored = 0  # of the blocks, the first so many
        self.fetches: list[Fetch] = []  # windows that hold what comes next
        self.tiers: set[str] = set()  # that gave something
        self.waits_since_s: float | None = None  # for a tier
        self.problem: Reason | None = None  # why it ended early

    @property
    def rest(self) -> tuple[Block, ...]:
        return self.blocks[self.restored :]

    def window_of(self, block: Block) -> Fetch | None:
        return next((fetch for fetch in self.fetches if block.key in fetch.blocks), None)
