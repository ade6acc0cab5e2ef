"""State in the engine's own memory: what a turn starts from, what stays, what makes room."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rekindle.engine.base import Engine, Sequence
from rekindle.errors import EngineBroken
from rekindle.kvcache.block import PrefixHandle
from rekindle.kvcache.plan import Live, Plan
from rekindle.kvcache.store import Store
from rekindle.runtime.checkpoints import Checkpoints
from rekindle.runtime.offload import Counts, IdleSequence, Offloader
from rekindle.runtime.planner import Planner
from rekindle.runtime.restorer import Restorer
from rekindle.runtime.turn import Offloaded, Turn
from rekindle.tokens import Tokens

DEVICE = "device"  # the tier that is the engine's own memory
HEADROOM_TOKENS = 64  # cells a turn is sure of for its reply when it starts


@dataclass(frozen=True, slots=True)
class Placed:
    """What a started turn was really given, and where it came from."""

    plan: Plan[Sequence]
    reused_tokens: int
    tier: str | None  # the slowest that gave something


class KvManager:
    """Gives turns a sequence with all that can be reused in it, and keeps what they leave."""

    def __init__(
        self, engine: Engine, store: Store, planner: Planner, *, idle_tokens: int, parallel: int
    ) -> None:
        self._engine = engine
        self._store = store
        self._planner = planner
        self._capabilities = engine.capabilities
        self._most_idle_tokens = idle_tokens
        self._most_idle = self._capabilities.sequences - parallel
        self._idle: list[IdleSequence] = []  # least recently used first
        self.counts = Counts()
        self._restorer = Restorer(engine, store, self.counts)
        self._offloader = Offloader(engine, store, self.counts)
        self.broken: EngineBroken | None = None  # since the last step

    # -- starting ------------------------------------------------------------------------------

    def plan(self, turn: Turn, running: list[Turn]) -> Plan[Sequence]:
        """The longest prefix that can be reused, of what is stored and of what is here."""
        return self._planner.plan(turn, self._live(turn.namespace, running))

    def fetch(self, turn: Turn, plan: Plan[Sequence]) -> bool:
        """Start fetching what the plan needs from lower tiers; False when all is at hand."""
        return self._restorer.fetch(turn, plan)

    def _live(self, namespace: bytes, running: list[Turn]) -> Iterator[Live[Sequence]]:
        allowed = (namespace, self._planner.shared_namespace)
        for idle in self._idle:
            if idle.namespace in allowed:
                yield Live(idle.sequence, idle.tokens)
        for turn in running:
            if turn.shares and turn.namespace in allowed and turn.sequence:
                yield Live(turn.sequence, turn.tokens.first(turn.held_tokens))

    def place(self, turn: Turn, plan: Plan[Sequence], running: list[Turn]) -> Placed | None:
        """Give the turn a sequence with all that the plan reuses in it; None: there is no room."""
        if not turn.request.exact and not self._reserve(turn, plan, running):
            if running:
                return None
            self.make_room(len(turn.tokens) + HEADROOM_TOKENS)
            plan = self.plan(turn, running)  # without the idle sequence it had counted on
        sequence = self._engine.open(exact=turn.request.exact)
        tier = self._apply(plan, sequence, turn)
        turn.sequence, turn.offloaded = sequence, Offloaded(0, turn.namespace)
        if turn.request.reuse and not self._capabilities.can_truncate:
            turn.checkpoints = self._checkpoints(turn, plan)
        return Placed(plan, sequence.length, tier)

    def _apply(self, plan: Plan[Sequence], sequence: Sequence, turn: Turn) -> str | None:
        """Carry the plan out as far as it goes; the slowest tier that gave something."""
        tier = None
        if plan.share is not None:
            self._engine.share(plan.share, plan.shared_tokens, sequence)
            self._supersede(plan.share, plan.shared_tokens, turn.namespace)
            tier = DEVICE
        tier = self._restorer.restore(plan, sequence, turn) or tier
        cut_short = sequence.length < plan.reused_tokens and not self._capabilities.can_truncate
        self._engine.truncate(sequence, 0 if cut_short else plan.reused_tokens)
        return tier if sequence.length else None

    def _checkpoints(self, turn: Turn, plan: Plan[Sequence]) -> Checkpoints:
        held = turn.held_tokens
        places = Checkpoints(
            turn.encoded.prompt, self._capabilities, exact=turn.request.exact, held=held
        )
        if plan.matched_tokens - held >= self._capabilities.block_tokens:
            places.add(plan.matched_tokens)  # conversations part here: there may be more of them
        return places

    def _reserve(self, turn: Turn, plan: Plan[Sequence], running: list[Turn]) -> bool:
        """Make sure that this turn and those already running can finish their prompts."""
        needed = len(turn.tokens) - plan.shared_tokens + min(turn.remaining_tokens, HEADROOM_TOKENS)
        promised = sum(
            other.pending_tokens + min(other.remaining_tokens, HEADROOM_TOKENS)
            for other in running
            if not other.request.exact
        )
        return self.make_room(needed + promised, spared=plan.share)

    def _supersede(self, source: Sequence, shared_tokens: int, namespace: bytes) -> None:
        """An idle sequence that was shared to its end lives on in the new one, if that is of the
        same tenant."""
        for idle in self._idle:
            if idle.sequence is source:
                self._idle.remove(idle)
                if shared_tokens >= len(idle.tokens) and idle.namespace == namespace:
                    self._engine.close_sequence(source)
                else:
                    self._idle.append(idle)  # used just now
                return

    # -- keeping -------------------------------------------------------------------------------

    def retire(self, turn: Turn) -> None:
        """Take the sequence off a turn, however it ended, and keep what it computed."""
        sequence, turn.sequence = turn.sequence, None
        turn.fetch = None  # should it start again, it looks again
        if sequence is None:
            return
        if not turn.request.reuse or not sequence.length:
            self._engine.close_sequence(sequence)
            return
        idle = self._offloader.idle(turn, sequence)
        if sequence.exact:
            self._offloader.offload(idle)  # its context is wanted by the next exact turn
            self._engine.close_sequence(sequence)
            return
        self._idle.append(idle)
        self._trim()

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

    def offload_one(self) -> bool:
        """Copy one block of an idle sequence to the store, for idle moments; False when all of
        them are there."""
        if self._store.tiers.is_congested:
            return False  # the writer says when it has caught up
        for idle in reversed(self._idle):  # the newest is the likeliest to be asked for
            if idle.offloaded.tokens < len(idle.tokens):
                self._offloader.offload_next(idle)
                return True
        return False

    def offload_all(self) -> None:
        """Copy to the store all that is still in the engine's memory alone."""
        with self._noting_breakage():
            for idle in self._idle:
                self._offloader.offload(idle)

    # -- making room ---------------------------------------------------------------------------

    def make_room(self, tokens: int, *, spared: Sequence | None = None) -> bool:
        """Move idle sequences down to the store until so many cells are free."""
        while self._engine.free_tokens < tokens:
            victim = next((each for each in self._idle if each.sequence is not spared), None)
            if victim is None:
                return False
            self._evict(victim)
        return True

    def _trim(self) -> None:
        """Idle state in the pool slows every step down a little; keep it within its share."""
        while (
            len(self._idle) > self._most_idle
            or sum(len(each.tokens) for each in self._idle) > self._most_idle_tokens
        ):
            self._evict(self._idle[0])

    def _evict(self, idle: IdleSequence) -> None:
        self._offloader.offload(idle)
        self._idle.remove(idle)
        self._engine.close_sequence(idle.sequence)

    def forget(self, handle: PrefixHandle) -> None:
        """Close idle sequences of a conversation that was deleted: it is not reused from here."""
        with self._noting_breakage():
            for idle in list(self._idle):
                if idle.namespace == handle.namespace and _is_along(handle.tokens, idle.tokens):
                    if len(idle.tokens) > len(handle.tokens):
                        self._offloader.offload(idle)  # a longer conversation may rest on it
                    self._idle.remove(idle)
                    self._engine.close_sequence(idle.sequence)

    @contextmanager
    def _noting_breakage(self) -> Iterator[None]:
        """The engine may break between two steps: turns that run are not there either any more,
        and whoever steps next has to know."""
        try:
            yield
        except EngineBroken as error:
            self._idle.clear()
            self.broken = error

    def lose_everything(self) -> None:
        """The engine was rebuilt: nothing lives there any more."""
        self._idle.clear()
        self.broken = None
        self.counts.rebuilds += 1


def _is_along(one: Tokens, other: Tokens) -> bool:
    """Whether one of the two is the beginning of the other."""
    return one.common_prefix(other) == min(len(one), len(other))
