"""State in the engine's own memory: what a turn starts from, what stays, what makes room."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rekindle.engine.base import Engine, KvType, Sequence
from rekindle.errors import EngineBroken
from rekindle.kvcache.block import PrefixHandle
from rekindle.kvcache.plan import Live, Plan
from rekindle.kvcache.store import Store
from rekindle.runtime.checkpoints import Checkpoints
from rekindle.runtime.cost_gate import CostGate
from rekindle.runtime.crossing import Crossing
from rekindle.runtime.idle_pool import IdlePool
from rekindle.runtime.idle_pools import IdlePools, RowsByType
from rekindle.runtime.offload import Allowance, Counts, Offloader
from rekindle.runtime.planner import Planner
from rekindle.runtime.precision import KvSpace
from rekindle.runtime.restorer import NowS, Restorer
from rekindle.runtime.transcoder import Transcoder
from rekindle.runtime.turn import Offloaded, Turn

DEVICE = "device"  # the tier that is the engine's own memory
HEADROOM_TOKENS = 64  # cells a turn is sure of for its reply when it starts
STEP_BYTES = 64 << 20  # of state that a step moves beside replies: some hundredths of a second
GPU_STEP_BYTES = 256 << 20  # as long, over a bus
HURRIED_TOKENS = 1024  # to be computed for a first token, which idle sequences do not delay much
MOST_PLANS = 3  # that a turn makes because what it wanted to resume from was gone


@dataclass(frozen=True, slots=True)
class Placed:
    """What a started turn was really given, and where it came from."""

    plan: Plan[Sequence]
    reused_tokens: int
    tier: str | None  # the slowest that gave something


class KvManager:
    """Gives turns a sequence with all that can be reused in it, and keeps what they leave."""

    def __init__(
        self,
        engine: Engine,
        store: Store,
        planner: Planner,
        now_s: NowS,
        *,
        idle_tokens: int,
        idle_by_cost: bool,
        parallel: int,
    ) -> None:
        self._engine = engine
        self._store = store
        self._planner = planner
        self._capabilities = engine.capabilities
        self.counts = Counts()
        step_bytes = GPU_STEP_BYTES if self._capabilities.device == "gpu" else STEP_BYTES
        self.allowance = Allowance(self.counts, step_bytes)
        self.cost_gate = CostGate(store.tiers)
        self._restorer = Restorer(engine, store, self.counts, self.allowance, self.cost_gate, now_s)
        self._offloader = Offloader(engine, store, self.counts)
        self._transcoder = Transcoder(engine, self.counts, self.allowance)

        copies = 0 if engine.parking is None else 1  # of parked sequences, to be exported
        self._most_sequences = self._capabilities.sequences - copies

        def idle_pool(kv_type: KvType) -> IdlePool:
            return IdlePool(
                engine,
                self._offloader,
                self.allowance,
                kv_type=kv_type,
                most_sequences=self._capabilities.sequences - parallel - copies,
                most_tokens=idle_tokens,
                by_cost=idle_by_cost,
            )

        self.idle = IdlePools(self._capabilities.kv_type, idle_pool)
        self.broken: EngineBroken | None = None  # since the last step
        self.is_computing = False  # a step is under way
        self._forgotten: list[PrefixHandle] = []  # conversations that were deleted meanwhile

    # -- starting ------------------------------------------------------------------------------

    def plan(self, turn: Turn, running: list[Turn], *, parked: bool = True) -> Plan[Sequence]:
        """The longest prefix that can be reused, of what is stored and of what is here, be it
        parked or not; the turn knows then which cells it begins in."""
        route = self._planner.route(turn, lambda space: self._live(space, running, parked))
        turn.space, turn.cross_at = route.space, route.cross_at
        may_cut = self._capabilities.can_truncate and not turn.request.exact
        return self.cost_gate.apply(route.plan, may_cut=may_cut)

    def _live(self, space: KvSpace, running: list[Turn], parked: bool) -> Iterator[Live[Sequence]]:
        shared = self._planner.shared_namespace
        is_usual = space.kv_type == self._capabilities.kv_type
        allowed = (space.namespace, shared if is_usual else None)
        for turn in running:
            if turn.shares and turn.space.namespace in allowed and turn.sequence:
                yield Live(turn.sequence, turn.tokens.first(turn.held_tokens))
        idle = [idle for idle in self.idle if idle.namespace in allowed]
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
        idle, kv_type = self.idle.of(turn.space.kv_type), turn.space.kv_type
        shared = [other for other in others if other.cells_in(kv_type)]
        tokens = len(turn.tokens) if turn.cross_at is None else min(turn.cross_at, len(turn.tokens))
        headroom = min(turn.remaining_tokens, HEADROOM_TOKENS)
        if plan.share is not None and plan.share.is_parked:
            tokens = max(tokens, plan.share.length)  # all of it is copied, then cut
        needed = tokens - self._free_of_charge(turn, plan) + headroom
        needed += _wanted_tokens(shared, kv_type)
        most_idle = self._most_sequences - len(shared) - 1
        if idle.could_make_room(needed, most_idle, plan.share):
            return plan if idle.make_room(needed, most_idle, plan.share) else None
        if plan.share is not None and plan.share.is_parked:  # all of it takes room
            running = [other for other in others if not other.restoration and not other.crossing]
            return self.reserve(turn, self.plan(turn, running, parked=False), others)
        if others:
            return None
        has_room = idle.make_room(len(turn.tokens) + HEADROOM_TOKENS, most_idle)
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
        idle, namespace = self.idle.of(turn.space.kv_type), turn.space.namespace
        is_over = idle.supersedes(plan.share, plan.shared_tokens, namespace)
        return plan.shared_tokens if is_over else 0

    def place(self, turn: Turn, plan: Plan[Sequence]) -> None:
        """Give the turn a sequence, with what the plan shares in it; `restore` brings the rest."""
        space = turn.space
        sequence = self._engine.open(exact=turn.request.exact, kv_type=space.kv_type)
        turn.sequence, turn.offloaded = sequence, Offloaded(0, space.namespace)
        if plan.share is not None:
            self._engine.share(plan.share, plan.shared_tokens, sequence)
            self.idle.supersede(plan.share, plan.shared_tokens, space.namespace)
        turn.restoration = self._restorer.begin(plan)

    def restore(self, turn: Turn) -> bool:
        """Bring in what the plan restores, as far as this step may; True when that is over."""
        assert turn.restoration is not None
        assert turn.sequence is not None
        return self._restorer.advance(turn.restoration, turn.sequence)

    def wait_s(self, turn: Turn) -> float | None:
        """How long a tier still has to answer the turn; None: it waits for none."""
        return self._restorer.wait_s(turn.restoration) if turn.restoration else None

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
            self._engine.close_sequence(sequence)
            turn.sequence = None
            return None
        self._restorer.count_use(restoration, turn.lookup.write_back)
        if turn.request.reuse and not self._capabilities.can_truncate:
            turn.checkpoints = self._checkpoints(turn, plan)
        tier = self._store.tiers.slower(*restoration.tiers) or (
            DEVICE if plan.share is not None else None
        )
        return Placed(plan, sequence.length, tier if sequence.length else None)

    def cross(self, turn: Turn, others: list[Turn]) -> bool:
        """Bring a turn's state over into the cells that it goes on in, as far as this step may;
        True when it is there. Raises NoMemory."""
        quantised, sequence = turn.precision.quantised, turn.sequence
        assert quantised is not None
        assert sequence is not None
        crossing = turn.crossing = turn.crossing or Crossing(sequence)
        if not sequence.exact:
            idle, kv_type = self.idle.of(quantised.kv_type), quantised.kv_type
            shared = [other for other in others if other.cells_in(kv_type)]
            needed = turn.wanted_tokens(kv_type, HEADROOM_TOKENS) + _wanted_tokens(shared, kv_type)
            most_idle = self._most_sequences - len(shared) - 1
            if not idle.make_room(needed, most_idle) and (shared or len(idle)):
                return False
        if not self._transcoder.advance(crossing, quantised.kv_type):
            return False
        turn.sequence, turn.space = crossing.into, quantised
        turn.crossing = turn.cross_at = None
        turn.offloaded = Offloaded(0, quantised.namespace)
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
        self._engine.truncate(sequence, keep)
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

    # -- keeping -------------------------------------------------------------------------------

    def retire(self, turn: Turn) -> None:
        """Take the sequence off a turn, however it ended, and keep what it computed."""
        sequence, is_whole = turn.sequence, turn.restoration is None
        if turn.crossing and turn.crossing.into:
            self._engine.close_sequence(turn.crossing.into)
        self.release(turn)
        if sequence is None:
            return
        if not turn.request.reuse or not sequence.length or not is_whole:
            self._engine.close_sequence(sequence)
            return
        idle = self._offloader.idle(turn, sequence)
        if sequence.exact:
            self._offloader.offload(idle)  # its context is wanted by the next exact turn
            self._engine.close_sequence(sequence)
            return
        self.idle.add(idle)

    def release(self, turn: Turn) -> None:
        """Let a turn hold nothing any more; should it start again, it looks again."""
        if turn.restoration is not None:
            self._restorer.release(turn.restoration)
        turn.sequence = turn.restoration = turn.crossing = None
        turn.plans = 0

    def offload_prompt(self, turn: Turn) -> None:
        """Copy the prompt of an exact turn to the store while it goes on."""
        if turn.sequence and turn.request.reuse and self._capabilities.can_truncate:
            self._offloader.offload(self._offloader.idle(turn, turn.sequence))

    def offload_checkpoint(self, turn: Turn) -> None:
        """Copy a turn's state as far as it has got, with a checkpoint, while it goes on."""
        assert turn.sequence is not None
        idle = self._offloader.idle(turn, turn.sequence)
        if self._offloader.offload(idle):
            turn.offloaded = idle.offloaded.full_blocks(self._capabilities.block_tokens)

    def export_some(self, running: list[Turn]) -> bool:
        """Go on with exports that were begun; False: the next step has to."""
        rows_ahead = RowsByType()
        for turn in running if self.idle.is_in_pool else ():
            if not turn.request.exact and not self._hurries(turn):
                rows_ahead[turn.space.kv_type] += turn.pending_tokens
        return self.idle.export_asked() and self.idle.trim(rows_ahead)

    def _hurries(self, turn: Turn) -> bool:
        """Whether its first token is so near that parking others would take longer."""
        is_near = not turn.generated_tokens and turn.pending_tokens <= HURRIED_TOKENS
        return is_near and self._engine.parking is not None

    def offload_one(self) -> bool:
        """Copy one block of an idle sequence to the store, for idle moments; False when all of
        them are there, or the writer has to catch up first."""
        return not self._store.tiers.is_congested and self.idle.use_moment()

    def export(self, handle: PrefixHandle, then: Callable[[], None]) -> None:
        """Call back when the state of a conversation that is in the engine's memory alone is in the
        store."""
        with self._noting_breakage():
            self.idle.export(handle, then)

    def offload_all(self) -> None:
        """Copy to the store all that is still in the engine's memory alone."""
        with self._noting_breakage():
            self.idle.export_all()

    # -- making room ---------------------------------------------------------------------------

    def make_room(self, tokens: int, kv_type: KvType | None = None) -> bool:
        """Move idle sequences down to the store until so many cells of a type are free; False:
        there are no more, or the step's allowance is spent."""
        idle = self.idle.of(kv_type or self._capabilities.kv_type)
        return idle.make_room(tokens, len(idle))

    def release_idle(self) -> None:
        """Give memory back that nobody has used since the last call."""
        with self._noting_breakage():
            self.idle.release_unused()
        self._engine.release_idle()

    def forget(self, handle: PrefixHandle) -> None:
        """Close idle sequences of a conversation that was deleted: it is not reused from here.
        While a step is under way none is touched: they are forgotten after it."""
        self._forgotten.append(handle)
        if not self.is_computing:
            self.forget_rest()

    def forget_rest(self) -> None:
        with self._noting_breakage():
            while self._forgotten:
                self.idle.forget(self._forgotten.pop(0))

    @contextmanager
    def _noting_breakage(self) -> Iterator[None]:
        """The engine may break between two steps: turns that run are not there either any more,
        and whoever steps next has to know."""
        try:
            yield
        except EngineBroken as error:
            self.idle.clear()
            self.broken = error

    def lose_everything(self) -> None:
        """The engine was rebuilt: nothing lives there any more."""
        self.idle.clear()
        self.broken = None
        self.counts.rebuilds += 1


def _wanted_tokens(turns: list[Turn], kv_type: KvType) -> int:
    """Cells that these turns still need for their prompts, and are sure of for their replies."""
    return sum(turn.wanted_tokens(kv_type, HEADROOM_TOKENS) for turn in turns)
