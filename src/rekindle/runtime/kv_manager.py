"""State in the engine's own memory: what a turn starts from, what stays, what makes room."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import merge

from rekindle.engine.base import Blob, Engine, Sequence
from rekindle.errors import CorruptBlock, EngineBroken, PoolFull
from rekindle.kvcache.block import Block, PrefixHandle, chain
from rekindle.kvcache.plan import (
    Live,
    Plan,
    resolve,
    resolve_exact,
    resolve_whole,
    resolve_whole_exact,
)
from rekindle.kvcache.store import Store
from rekindle.kvcache.tree import Match
from rekindle.runtime.checkpoints import Checkpoints
from rekindle.runtime.offload import Counts, IdleSequence, Offloader
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
    """Starts turns from whatever can be reused, and keeps what they leave behind."""

    def __init__(
        self,
        engine: Engine,
        store: Store,
        *,
        idle_tokens: int,
        shared_namespace: bytes | None = None,
    ) -> None:
        self._engine = engine
        self._store = store
        self._shared = shared_namespace  # of what the operator declared common to all tenants
        self._capabilities = engine.capabilities
        self._most_idle_tokens = idle_tokens
        self._most_idle = self._capabilities.sequences - self._capabilities.exact_sequences
        self._idle: list[IdleSequence] = []  # least recently used first
        self.counts = Counts()
        self._offloader = Offloader(engine, store, self.counts)
        self.broken: EngineBroken | None = None  # since the last step

    @property
    def can_truncate(self) -> bool:
        """Whether a turn may resume at any position, not at checkpoints alone."""
        return self._capabilities.can_truncate

    # -- looking -------------------------------------------------------------------------------

    def plan(self, turn: Turn, running: list[Turn]) -> Plan[Sequence]:
        """The longest prefix that can be reused; changes nothing."""
        if not turn.request.reuse:
            return Plan.nothing()
        usable = turn.tokens.first(len(turn.tokens) - 1)  # the last token is always computed
        stored = self._match(turn.namespace, usable)
        live = self._live(turn.namespace, running)
        block_tokens = self._capabilities.block_tokens
        step_tokens = self._capabilities.step_tokens
        if self._capabilities.can_truncate:
            if turn.request.exact:
                return resolve_exact(stored, step_tokens=step_tokens)
            return resolve(usable, stored, live, block_tokens=block_tokens)
        checkpoints = self._resumable(turn.namespace, usable)
        if turn.request.exact:
            return resolve_whole_exact(stored, checkpoints, step_tokens=step_tokens)
        return resolve_whole(usable, stored, checkpoints, live)

    def match(self, namespace: bytes, tokens: Tokens) -> Match:
        """The stored state that equals these tokens, whether or not a turn can resume from it."""
        return self._match(namespace, tokens)

    def reusable_tokens(self, namespace: bytes, tokens: Tokens) -> int:
        """How much of these tokens a turn would find in the store."""
        if self._capabilities.can_truncate:
            return self._match(namespace, tokens).tokens
        newest = next(self._resumable(namespace, tokens), None)
        return newest.stop if newest else 0

    def ends(self, handle: PrefixHandle) -> Iterator[Block]:
        """Blocks after which a turn could go on with a conversation."""
        if self._capabilities.can_truncate:
            return chain(handle.block)
        return self._resumable(handle.namespace, handle.tokens)

    def _resumable(self, namespace: bytes, tokens: Tokens) -> Iterator[Block]:
        """Checkpoints of the tenant and of what is common to all, the newest first."""
        namespaces = {namespace, self._shared or namespace}
        found = (self._store.checkpoints(each, tokens) for each in namespaces)
        return merge(*found, key=lambda block: -block.stop)

    def _match(self, namespace: bytes, tokens: Tokens) -> Match:
        """What the tenant has stored, or what is common to all if that goes further."""
        own = self._store.match(namespace, tokens)
        if self._shared is None:
            return own
        common = self._store.match(self._shared, tokens)
        return common if common.tokens > own.tokens else own

    def _live(self, namespace: bytes, running: list[Turn]) -> Iterator[Live[Sequence]]:
        allowed = (namespace, self._shared)
        for idle in self._idle:
            if idle.namespace in allowed:
                yield Live(idle.sequence, idle.tokens)
        for turn in running:
            if turn.shares and turn.namespace in allowed and turn.sequence:
                yield Live(turn.sequence, turn.tokens.first(turn.held_tokens))

    # -- starting ------------------------------------------------------------------------------

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
        turn.damaged = True
        return any(self._blob(block, turn) is None for block in plan.blocks)

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

    def _apply(self, plan: Plan[Sequence], sequence: Sequence, turn: Turn) -> str | None:
        """Carry the plan out as far as it goes; the slowest tier that gave something."""
        tier = None
        if plan.share is not None:
            self._engine.share(plan.share, plan.shared_tokens, sequence)
            self._supersede(plan.share, plan.shared_tokens, turn.namespace)
            tier = DEVICE
        restored = self._restore_all(plan, sequence, turn)
        if restored:
            tier = self._slowest_source(restored, turn)
        if turn.fetch is not None:
            turn.damaged |= bool(turn.fetch.bad)
            turn.fetch.records.clear()  # the bytes are in place, or in RAM, or not needed
        whole = [block for block in restored if block.stop <= plan.reused_tokens]
        self._store.use(whole, turn.lookup.write_back)
        self._store.use(restored[len(whole) :])  # only its beginning is this conversation's
        cut_short = sequence.length < plan.reused_tokens and not self._capabilities.can_truncate
        self._engine.truncate(sequence, 0 if cut_short else plan.reused_tokens)
        return tier if sequence.length else None

    def _slowest_source(self, restored: list[Block], turn: Turn) -> str | None:
        """The tier that the slowest of these blocks came from."""
        fetched = turn.fetch.sources if turn.fetch else {}
        read = turn.fetch.records if turn.fetch else {}
        names = (fetched[each.key] for each in restored if each.key in read)
        return self._store.tiers.slower(self._store.tiers[0].name, *names)

    def _restore_all(self, plan: Plan[Sequence], sequence: Sequence, turn: Turn) -> list[Block]:
        """Restore blocks up to the first that cannot be; the rest is computed."""
        restored = []
        for block in plan.blocks:
            blob = self._blob(block, turn)
            is_last = block is plan.blocks[-1]
            if blob is None or not self._restore(sequence, block, blob, resumable=is_last):
                break
            restored.append(block)
        return restored

    def _blob(self, block: Block, turn: Turn) -> Blob | None:
        blob = self._store.get(block)
        if blob is not None or turn.fetch is None:
            return blob
        return turn.fetch.blob(block)  # RAM had no room to keep it

    def _restore(self, sequence: Sequence, block: Block, blob: Blob, *, resumable: bool) -> bool:
        """Append a block; the checkpoint it may have is of use only in the last one."""
        resumable = resumable and not self._capabilities.can_truncate
        if block.resumable and not resumable:
            blob = memoryview(blob)[: -self._capabilities.kv_layout.checkpoint_bytes]
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
        self.counts.restored_bytes += len(blob)
        return True

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
