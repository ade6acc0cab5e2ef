"""How turns come into the engine: a sequence each, with all in it that can be reused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rekindle.engine.base import Engine, KvType, Sequence
from rekindle.errors import PoolFull
from rekindle.kvcache.plan import Live, Plan
from rekindle.kvcache.store import Store
from rekindle.kvcache.tiers.base import DEVICE
from rekindle.runtime.device.kv_manager import KvManager
from rekindle.runtime.device.offload import Counts, StepBudget
from rekindle.runtime.encode.precision import KvFormat
from rekindle.runtime.reuse.planner import Planner
from rekindle.runtime.schedule.turn import Checkpoints, Offloaded, Requantisation, Turn

# ----------------------------------------------------------------------
# A turn's state from cells of one type into cells of another, while it goes on.
#
# When a sequence goes beyond the start of quantisation, all that it holds is written again in
# smaller cells, a slice a step; nothing is computed twice.


class Requantiser:
    """Carries requantisations on, within the step's budget."""

    def __init__(self, engine: Engine, counts: Counts, budget: StepBudget) -> None:
        self._engine = engine
        self._counts = counts
        self._budget = budget
        self._block_tokens = engine.capabilities.block_tokens
        self._can_truncate = engine.capabilities.can_truncate

    def advance(self, requantisation: Requantisation, kv_type: KvType) -> bool:
        """Go on; True when all is over there and the source is closed. Raises NoMemory."""
        source = requantisation.source
        try:
            if requantisation.into is None:
                requantisation.into = self._engine.sequences.open(
                    exact=source.exact, kv_type=kv_type
                )
            while requantisation.into.length < source.length:
                if self._budget.is_spent:
                    return False
                self._move_block(source, requantisation.into)
        except PoolFull:
            return False  # others will end and make room
        self._engine.sequences.close(source)
        return True

    def _move_block(self, source: Sequence, into: Sequence) -> None:
        start = into.length
        stop = min(start + self._block_tokens, source.length)
        resumable = stop == source.length and not self._can_truncate
        blob = self._engine.sequences.export(source, start, stop, resumable=resumable)
        small = self._engine.sequences.requantise(
            blob, stop - start, source.kv_type, into.kv_type, resumable=resumable
        )
        self._engine.sequences.restore(into, small, stop - start, resumable=resumable)
        self._counts.transcoded_bytes += len(blob)
        self._counts.transcoded_tokens += stop - start


HEADROOM_TOKENS = 64  # cells a turn is sure of for its reply when it starts
MOST_PLANS = 3  # that a turn makes because what it wanted to resume from was gone


@dataclass(frozen=True, slots=True)
class Placed:
    """What a started turn was really given, and where it came from."""

    plan: Plan[Sequence]
    reused_tokens: int
    tier: str | None  # the slowest that gave something


class Admission:
    """Plans, makes room, opens a sequence and brings in what is reused, a slice a step."""

    def __init__(self, engine: Engine, store: Store, planner: Planner, kv: KvManager) -> None:
        self._engine = engine
        self._capabilities = engine.capabilities
        self._store = store
        self._planner = planner
        self._kv = kv
        self._idle = kv.idle
        self._requantiser = Requantiser(engine, kv.counts, kv.budget)

    def plan(self, turn: Turn, running: list[Turn], *, parked: bool = True) -> Plan[Sequence]:
        """The longest prefix that can be reused, of what is stored and of what is here, be it
        parked or not; the turn knows then which cells it begins in."""
        route = self._planner.route(turn, lambda kv_format: self._live(kv_format, running, parked))
        turn.kv_format, turn.requantise_at = route.kv_format, route.requantise_at
        may_cut = self._capabilities.can_truncate and not turn.request.exact
        return self._kv.cost_gate.apply(route.plan, may_cut=may_cut)

    def _live(
        self, kv_format: KvFormat, running: list[Turn], parked: bool
    ) -> Iterator[Live[Sequence]]:
        shared = self._planner.shared_namespace
        is_default = kv_format.kv_type == self._capabilities.kv_type
        allowed = (kv_format.namespace, shared if is_default else None)
        for turn in running:
            if turn.shares and turn.kv_format.namespace in allowed and turn.sequence:
                yield Live(turn.sequence, turn.tokens.first(turn.held_tokens))
        idle = [idle for idle in self._idle if idle.namespace in allowed]
        idle = [each for each in idle if parked or not each.sequence.is_parked]
        for each in sorted(idle, key=lambda each: each.sequence.is_parked):  # the nearest first
            yield Live(each.sequence, each.tokens, is_copied=each.sequence.is_parked)

    def reserve(
        self, turn: Turn, plan: Plan[Sequence], others: list[Turn]
    ) -> Plan[Sequence] | None:
        """Make sure that this turn and the others can finish their prompts; nothing is evicted
        unless they can. The plan to carry out; None: there is no room now."""
        if turn.request.exact:
            return plan
        idle, kv_type = self._idle.of(turn.kv_format.kv_type), turn.kv_format.kv_type
        shared = [other for other in others if other.cells_in(kv_type)]
        tokens = (
            len(turn.tokens)
            if turn.requantise_at is None
            else min(turn.requantise_at, len(turn.tokens))
        )
        headroom = min(turn.output.remaining_tokens, HEADROOM_TOKENS)
        is_parked = plan.share is not None and plan.share.is_parked
        if plan.share is not None and is_parked:
            tokens = max(tokens, plan.share.length)  # all of it is copied, then cut
        needed = tokens - self._free_of_charge(turn, plan) + headroom
        needed += _wanted_tokens(shared, kv_type)
        max_idle = self._kv.max_sequences - len(shared) - 1
        if not shared and (plan.blocks or is_parked):
            idle.park_fragments(plan.share)
        if idle.could_make_room(needed, max_idle, plan.share):
            return plan if idle.make_room(needed, max_idle, plan.share) else None
        if is_parked:  # all of it takes room
            running = [
                other for other in others if not other.restoration and not other.requantisation
            ]
            return self.reserve(turn, self.plan(turn, running, parked=False), others)
        if others:
            return None
        has_room = idle.make_room(len(turn.tokens) + HEADROOM_TOKENS, max_idle)
        if not has_room and len(idle):
            return None  # the next step goes on
        return self.plan(turn, others, parked=False)  # nor with what it had counted on

    def _free_of_charge(self, turn: Turn, plan: Plan[Sequence]) -> int:
        """Tokens that are shared and take no cells more: none of a parked source, and where
        sequences have cells of their own none unless the source is closed at once."""
        if plan.share is None or plan.share.is_parked:
            return 0
        if self._capabilities.shares_cells:
            return plan.shared_tokens
        idle, namespace = self._idle.of(turn.kv_format.kv_type), turn.kv_format.namespace
        is_over = idle.sequences.supersedes(plan.share, plan.shared_tokens, namespace)
        return plan.shared_tokens if is_over else 0

    def place(self, turn: Turn, plan: Plan[Sequence]) -> None:
        """Give the turn a sequence, with what the plan shares in it; `restore` brings the rest."""
        kv_format, source, shared_tokens = turn.kv_format, plan.share, plan.shared_tokens
        turn.offloaded = Offloaded(0, kv_format.namespace)
        if source is not None and self._idle.supersede(source, shared_tokens, kv_format.namespace):
            turn.sequence = source
        else:
            turn.sequence = self._engine.sequences.open(
                exact=turn.request.exact, kv_type=kv_format.kv_type
            )
            if source is not None:
                self._engine.sequences.share(source, shared_tokens, turn.sequence)
        turn.restoration = self._kv.restorer.begin(plan)

    def restore(self, turn: Turn) -> bool:
        """Bring in what the plan restores, as far as this step may; True when that is over."""
        assert turn.restoration is not None
        assert turn.sequence is not None
        return self._kv.restorer.advance(turn.restoration, turn.sequence)

    def wait_s(self, turn: Turn) -> float | None:
        """How long a tier still has to answer the turn; None: it waits for none."""
        return self._kv.restorer.wait_s(turn.restoration) if turn.restoration else None

    def placed(self, turn: Turn) -> Placed | None:
        """What a turn got, its restoration being over; None: it has to plan again, for what it was
        to resume from is not there any more."""
        restoration, sequence = turn.restoration, turn.sequence
        assert restoration is not None
        assert sequence is not None
        turn.restoration, plan = None, restoration.plan
        turn.problem = restoration.problem or turn.problem
        turn.plans += 1
        if not self._cut(turn, sequence, plan) and turn.plans < MOST_PLANS:
            self._engine.sequences.close(sequence)
            turn.sequence = None
            return None
        self._kv.restorer.count_use(restoration, turn.lookup.write_back)
        if turn.request.reuse and not self._capabilities.can_truncate:
            turn.checkpoints = self._checkpoints(turn, plan)
        tier = self._store.tiers.slower(*restoration.tiers) or (
            DEVICE if plan.share is not None else None
        )
        return Placed(plan, sequence.length, tier if sequence.length else None)

    def requantise(self, turn: Turn, others: list[Turn]) -> bool:
        """Bring a turn's state over into the cells that it goes on in, as far as this step may;
        True when it is there. Raises NoMemory."""
        target, sequence = turn.precision.target, turn.sequence
        assert target is not None
        assert sequence is not None
        requantisation = turn.requantisation = turn.requantisation or Requantisation(sequence)
        if not sequence.exact:
            idle, kv_type = self._idle.of(target.kv_type), target.kv_type
            shared = [other for other in others if other.cells_in(kv_type)]
            needed = turn.wanted_tokens(kv_type, HEADROOM_TOKENS) + _wanted_tokens(shared, kv_type)
            max_idle = self._kv.max_sequences - len(shared) - 1
            if not idle.make_room(needed, max_idle) and (shared or len(idle)):
                return False
        if not self._requantiser.advance(requantisation, target.kv_type):
            return False
        turn.sequence, turn.kv_format = requantisation.into, target
        turn.requantisation = turn.requantise_at = None
        turn.offloaded = Offloaded(0, target.namespace)
        return True

    def _cut(self, turn: Turn, sequence: Sequence, plan: Plan[Sequence]) -> bool:
        """Leave what can be gone on from; False: nothing can, where there was to be something."""
        is_whole = sequence.length >= plan.reused_tokens
        if is_whole:
            keep = plan.reused_tokens
        elif not self._capabilities.can_truncate:
            keep = 0  # there is no checkpoint
        else:
            keep = self._whole_steps(turn, sequence.length)
        self._engine.sequences.truncate(sequence, keep)
        return is_whole or self._capabilities.can_truncate

    def _whole_steps(self, turn: Turn, tokens: int) -> int:
        """The most tokens, up to so many, after which a turn may go on: no canonical step is cut,
        and no picture that is computed whole."""
        grain = self._capabilities.step_tokens if turn.request.exact else 1
        if not self._capabilities.whole_pictures:
            return tokens - tokens % grain
        whole = turn.tokens.whole_media(tokens)
        while whole != tokens or tokens % grain:
            tokens = whole - whole % grain
            whole = turn.tokens.whole_media(tokens)
        return tokens

    def _checkpoints(self, turn: Turn, plan: Plan[Sequence]) -> Checkpoints:
        held = turn.held_tokens
        places = Checkpoints(
            turn.encoded.prompt, self._capabilities, exact=turn.request.exact, held=held
        )
        if plan.matched_tokens - held >= self._capabilities.block_tokens:
            places.add(plan.matched_tokens)  # conversations part here: there may be more of them
        return places


def _wanted_tokens(turns: list[Turn], kv_type: KvType) -> int:
    """Cells that these turns still need for their prompts, and are sure of for their replies."""
    return sum(turn.wanted_tokens(kv_type, HEADROOM_TOKENS) for turn in turns)
