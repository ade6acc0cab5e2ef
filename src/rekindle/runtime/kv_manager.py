"""The engine's own memory as a tier: who lives there, who is kept, who makes room."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from heapq import merge

from rekindle.engine.base import Engine, Sequence
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
from rekindle.kvcache.tiers.base import Blob
from rekindle.kvcache.tree import Match
from rekindle.protocol.events import CacheReport, Reason
from rekindle.runtime.checkpoints import Checkpoints
from rekindle.runtime.offload import Counts, Keeper, Resident
from rekindle.runtime.turn import Kept, Turn
from rekindle.tokens import Tokens

HEADROOM_TOKENS = 64  # cells a turn is sure of for its reply when it starts


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a started turn was really given, and where it came from."""

    plan: Plan[Sequence]
    reused_tokens: int
    tier: str | None


Explain = Callable[[Turn, Outcome], CacheReport]


class Start(Enum):
    STARTED = "started"
    NO_ROOM = "no room"
    FETCHING = "fetching"  # what it can reuse is on its way from a lower tier


class Device:
    """Starts turns from whatever can be reused, and keeps what they leave behind."""

    def __init__(
        self,
        engine: Engine,
        store: Store,
        explain: Explain,
        *,
        resident_tokens: int,
        shared: bytes | None = None,
    ) -> None:
        self._engine = engine
        self._store = store
        self._explain = explain
        self._shared = shared  # the namespace of what the operator declared common to all
        self._abilities = engine.abilities
        self._most_resident_tokens = resident_tokens
        self._most_residents = self._abilities.sequences - self._abilities.exact_sequences
        self._residents: list[Resident] = []  # least recently used first
        self.counts = Counts()
        self._keeper = Keeper(engine, store, self.counts)
        self.broken: EngineBroken | None = None  # since the last step

    # -- starting ------------------------------------------------------------------------------

    def start(self, turn: Turn, active: list[Turn]) -> Start:
        """Give the turn a sequence with all that can be reused in it."""
        plan = self._plan(turn, active)
        if self._is_to_fetch(plan, turn):
            turn.fetch = self._store.fetch(plan.blocks)
            if turn.is_fetching:
                self._store.use(plan.blocks)  # or what is kept meanwhile might take their place
                return Start.FETCHING
        if not turn.ask.exact and not self._reserve(turn, plan, active):
            if active:
                return Start.NO_ROOM
            self.make_room(len(turn.tokens) + HEADROOM_TOKENS)
            plan = self._plan(turn, active)  # without the resident it had counted on
        sequence = self._engine.open(exact=turn.ask.exact)
        tier = self._apply(plan, sequence, turn)
        turn.sequence, turn.kept = sequence, Kept(0, turn.namespace)
        if turn.ask.reuse and not self._abilities.can_cut:
            turn.checkpoints = self._checkpoints(turn, plan)
        if turn.report is None:  # a turn that starts again has reported
            turn.report = self._explain(turn, Outcome(plan, sequence.length, tier))
            self.counts.reused_tokens += sequence.length
        return Start.STARTED

    def _is_to_fetch(self, plan: Plan[Sequence], turn: Turn) -> bool:
        """Once; and again when a bad block has left another way to go on."""
        if turn.fetch is None:
            return True
        if not turn.fetch.bad:
            return False
        turn.trouble = turn.trouble or Reason.CORRUPT
        return any(self._blob(block, turn) is None for block in plan.blocks)

    def _checkpoints(self, turn: Turn, plan: Plan[Sequence]) -> Checkpoints:
        held = turn.held_tokens
        places = Checkpoints(turn.prompt, self._abilities, exact=turn.ask.exact, held=held)
        if plan.matched_tokens - held >= self._abilities.block_tokens:
            places.add(plan.matched_tokens)  # conversations part here: there may be more of them
        return places

    def _plan(self, turn: Turn, active: list[Turn]) -> Plan[Sequence]:
        if not turn.ask.reuse:
            return Plan.nothing()
        usable = turn.buffer.first(len(turn.tokens) - 1)  # the last token is always computed
        stored = self._match(turn.namespace, usable)
        live = self._live(turn.namespace, active)
        block_tokens, step_tokens = self._abilities.block_tokens, self._abilities.step_tokens
        if self._abilities.can_cut:
            if turn.ask.exact:
                return resolve_exact(stored, step_tokens=step_tokens)
            return resolve(usable, stored, live, block_tokens=block_tokens)
        checkpoints = self._resumable(turn.namespace, usable)
        if turn.ask.exact:
            return resolve_whole_exact(stored, checkpoints, step_tokens=step_tokens)
        return resolve_whole(usable, stored, checkpoints, live)

    def reusable_tokens(self, namespace: bytes, tokens: Tokens) -> int:
        """How much of these tokens a turn would find in the store; changes nothing."""
        if self._abilities.can_cut:
            return self._match(namespace, tokens).tokens
        newest = next(self._resumable(namespace, tokens), None)
        return newest.stop if newest else 0

    def ends(self, handle: PrefixHandle) -> Iterator[Block]:
        """Blocks after which a turn could go on with a conversation."""
        if self._abilities.can_cut:
            return chain(handle.block)
        return self._resumable(handle.namespace, handle.tokens)

    def equal_tokens(self, namespace: bytes, tokens: Tokens) -> int:
        """How much of these tokens the store holds, whether or not a turn can go on from there."""
        return self._match(namespace, tokens).tokens

    def _resumable(self, namespace: bytes, tokens: Tokens) -> Iterator[Block]:
        """Checkpoints of the tenant's and of what is common to all, the newest first."""
        roots = {namespace, self._shared or namespace}
        found = (self._store.checkpoints(root, tokens) for root in roots)
        return merge(*found, key=lambda block: -block.stop)

    def _match(self, namespace: bytes, tokens: Tokens) -> Match:
        """What the tenant has stored, or what is common to all if that goes further."""
        own = self._store.match(namespace, tokens)
        if self._shared is None:
            return own
        common = self._store.match(self._shared, tokens)
        return common if common.tokens > own.tokens else own

    def _live(self, namespace: bytes, active: list[Turn]) -> Iterator[Live[Sequence]]:
        open_to_it = (namespace, self._shared)
        for resident in self._residents:
            if resident.namespace in open_to_it:
                yield Live(resident.sequence, resident.prefix)
        for turn in active:
            if turn.shares and turn.namespace in open_to_it and turn.sequence:
                yield Live(turn.sequence, turn.buffer.first(turn.held_tokens))

    def _reserve(self, turn: Turn, plan: Plan[Sequence], active: list[Turn]) -> bool:
        """Make sure that this turn and those already running can finish their prompts."""
        needed = len(turn.tokens) - plan.shared_tokens + min(turn.remaining_tokens, HEADROOM_TOKENS)
        promised = sum(
            other.pending_tokens + min(other.remaining_tokens, HEADROOM_TOKENS)
            for other in active
            if not other.ask.exact
        )
        return self.make_room(needed + promised, spared=plan.share)

    def _apply(self, plan: Plan[Sequence], sequence: Sequence, turn: Turn) -> str | None:
        """Carry the plan out as far as it goes; the slowest tier that gave something."""
        source = None
        if plan.share is not None:
            self._engine.share(plan.share, plan.shared_tokens, sequence)
            self._supersede(plan.share, plan.shared_tokens, turn.namespace)
            source = "device"
        restored = []
        for block in plan.blocks:
            blob = self._blob(block, turn)
            last = block is plan.blocks[-1]
            if blob is None or not self._restore(sequence, block, blob, resumable=last):
                break  # what is in place stays; the rest is computed
            restored.append(block)
        if restored:
            source = self._slowest_source(restored, turn)
        if turn.fetch is not None:
            if turn.fetch.bad:
                turn.trouble = turn.trouble or Reason.CORRUPT
            turn.fetch.records.clear()  # the bytes are in place, or in RAM, or not needed
        whole = [block for block in restored if block.stop <= plan.reused_tokens]
        self._store.use(whole, turn.write_back)
        self._store.use(restored[len(whole) :])  # only its beginning is this conversation's
        cut_short = sequence.length < plan.reused_tokens and not self._abilities.can_cut
        self._engine.cut(sequence, 0 if cut_short else plan.reused_tokens)
        return source if sequence.length else None

    def _slowest_source(self, restored: list[Block], turn: Turn) -> str | None:
        """The tier that the slowest of these blocks came from."""
        read = turn.fetch.records.keys() if turn.fetch else ()
        sources = turn.fetch.sources if turn.fetch else {}
        names = (sources[each.key] for each in restored if each.key in read)
        return self._store.slower(self._store.tiers[0].name, *names)

    def _blob(self, block: Block, turn: Turn) -> Blob | None:
        blob = self._store.get(block)
        if blob is None and turn.fetch:
            return turn.fetch.blob(block)  # the first tier had no room to keep it
        return blob

    def _restore(self, sequence: Sequence, block: Block, blob: Blob, *, resumable: bool) -> bool:
        """Append a block; the checkpoint it may have is of use only in the last one."""
        resumable = resumable and not self._abilities.can_cut
        if block.resumable and not resumable:
            blob = memoryview(blob)[: -self._abilities.checkpoint_bytes]
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
        """A resident that was shared to its end lives on in the new sequence, if that is of the
        same tenant."""
        for resident in self._residents:
            if resident.sequence is source:
                self._residents.remove(resident)
                if shared_tokens >= resident.tokens and resident.namespace == namespace:
                    self._engine.close_sequence(source)
                else:
                    self._residents.append(resident)  # used just now
                return

    # -- keeping -------------------------------------------------------------------------------

    def retire(self, turn: Turn) -> None:
        """Take the sequence off a turn, however it ended, and keep what it computed."""
        sequence, turn.sequence = turn.sequence, None
        turn.fetch = None  # should it start again, it looks again
        if sequence is None:
            return
        keeps = turn.ask.reuse and sequence.length > 0
        if not keeps:
            self._engine.close_sequence(sequence)
            return
        resident = self._keeper.resident(turn, sequence)
        if sequence.exact:
            self._keeper.keep_all(resident)  # its lane is wanted by the next exact turn
            self._engine.close_sequence(sequence)
            return
        self._residents.append(resident)
        self._trim()

    def keep_prompt(self, turn: Turn) -> None:
        """Keep the prompt of an exact turn while it goes on."""
        if turn.sequence is not None and turn.ask.reuse and self._abilities.can_cut:
            self._keeper.keep_all(self._keeper.resident(turn, turn.sequence))

    def keep_checkpoint(self, turn: Turn) -> None:
        """Keep a turn's state as far as it has got, with a checkpoint, while it goes on."""
        assert turn.sequence is not None
        resident = self._keeper.resident(turn, turn.sequence)
        if self._keeper.keep_all(resident):
            turn.kept = resident.kept.whole(self._abilities.block_tokens)

    def keep_one(self) -> bool:
        """Export one block of a resident; False when all are kept. For idle moments."""
        if self._store.is_congested:
            return False  # the writer says when it has caught up
        for resident in reversed(self._residents):  # the newest is the likeliest to be asked for
            if resident.kept.tokens < resident.tokens:
                self._keeper.keep_next(resident)
                return True
        return False

    # -- making room ---------------------------------------------------------------------------

    def make_room(self, tokens: int, *, spared: Sequence | None = None) -> bool:
        """Move idle residents down to the store until so many cells are free."""
        while self._engine.free_tokens < tokens:
            victim = next((r for r in self._residents if r.sequence is not spared), None)
            if victim is None:
                return False
            self._evict(victim)
        return True

    def _trim(self) -> None:
        """Idle state in the pool slows every step down a little; keep it within its share."""
        while (
            len(self._residents) > self._most_residents
            or sum(resident.tokens for resident in self._residents) > self._most_resident_tokens
        ):
            self._evict(self._residents[0])

    def _evict(self, resident: Resident) -> None:
        self._keeper.keep_all(resident)
        self._residents.remove(resident)
        self._engine.close_sequence(resident.sequence)

    def keep_everything(self) -> None:
        """Export all that is still here alone."""
        with self._noticing():
            for resident in self._residents:
                self._keeper.keep_all(resident)

    def forget(self, handle: PrefixHandle) -> None:
        """Close residents of this conversation: what was deleted is not reused from here."""
        with self._noticing():
            self._forget(handle)

    def _forget(self, handle: PrefixHandle) -> None:
        for resident in list(self._residents):
            least = min(len(handle.tokens), resident.tokens)
            of_it = handle.tokens.common_prefix(resident.prefix) == least
            if resident.namespace == handle.namespace and of_it:
                if resident.tokens > len(handle.tokens):
                    self._keeper.keep_all(resident)  # a longer conversation may rest on it
                self._residents.remove(resident)
                self._engine.close_sequence(resident.sequence)

    @contextmanager
    def _noticing(self) -> Iterator[None]:
        """The engine may break between two steps: turns that run are not there either any more,
        and whoever steps next has to know."""
        try:
            yield
        except EngineBroken as error:
            self._residents.clear()
            self.broken = error

    def lose_everything(self) -> None:
        """The engine was rebuilt: nothing lives there any more."""
        self._residents.clear()
        self.broken = None
        self.counts.rebuilds += 1
