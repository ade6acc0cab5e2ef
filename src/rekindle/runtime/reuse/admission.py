"""Admits turns: finds what they can reuse, reserves KV cells, and gives each turn a sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from heapq import merge

from rekindle.engine.base import Capabilities, Engine, KvType, Sequence
from rekindle.errors import PoolFull
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
from rekindle.kvcache.tiers.base import DEVICE
from rekindle.kvcache.tree import Match
from rekindle.runtime.device.kv_manager import KvManager
from rekindle.runtime.encode.request import KvFormat
from rekindle.runtime.schedule.turn import Checkpoints, Offloaded, Requantisation, Turn
from rekindle.tokens import Tokens

LiveIn = Callable[[KvFormat], Iterable[Live[Sequence]]]


@dataclass(frozen=True, slots=True)
class Route:
    """What a turn reuses, the KV format it starts with, and where it is requantised."""

    plan: Plan[Sequence]
    kv_format: KvFormat
    requantise_at: int | None = None  # None: never


@dataclass(frozen=True, slots=True)
class Planner:
    """A tenant sees its own state, and the state that the operator shares with all tenants or with
    a group of them. `groups` are the namespaces of the latter."""

    capabilities: Capabilities
    store: Store
    shared_namespace: bytes

    @property
    def can_truncate(self) -> bool:
        """Whether state can be cut at any token. Otherwise turns resume at checkpoints only."""
        return self.capabilities.can_truncate

    def route(self, turn: Turn, live: LiveIn) -> Route:
        """Reuse the longest prefix: state of the target KV type, or state of the default type that
        is requantised afterwards.

        Tokens before the start of quantisation are never computed from quantised state. An exact
        turn requantises where a cold one would. Other turns requantise after the last token for
        which state of the default type exists.
        """
        precision, usable = turn.precision, len(turn.tokens) - 1
        default, target, start = precision.default, precision.target, precision.start_tokens
        if target is None or precision.format_at(len(turn.tokens)) == default:
            plan = self.plan(turn, default, live(default), usable)
            return Route(plan, default, None if target is None else start)
        quantised = self.plan(turn, target, live(target), usable)
        has_quantised = quantised.reused_tokens >= start
        if has_quantised and (turn.request.exact or not precision.can_requantise):
            return Route(quantised, target)
        limit = start if turn.request.exact else usable
        full = self.plan(turn, default, live(default), limit)
        if (
            has_quantised
            and full.reused_tokens < quantised.reused_tokens + self.capabilities.block_tokens
        ):
            return Route(quantised, target)
        return Route(full, default, max(full.reused_tokens, start))

    def plan(
        self, turn: Turn, kv_format: KvFormat, live: Iterable[Live[Sequence]], limit: int
    ) -> Plan[Sequence]:
        """The longest reusable prefix of the turn's first `limit` tokens, in one KV format.

        `limit` excludes the last token of the prompt, which is always computed for its logits.
        """
        if not turn.request.reuse:
            return Plan.nothing()
        usable = turn.tokens.first(turn.tokens.whole_media(limit))  # never cut an image
        is_default = kv_format == turn.precision.default
        groups = turn.encoded.groups
        stored = self.match(kv_format.namespace, usable, groups, is_default=is_default)
        if self.can_truncate:
            if turn.request.exact:
                whole = usable if self.capabilities.whole_pictures else Tokens()
                return resolve_exact(whole, stored, step_tokens=self.capabilities.step_tokens)
            return resolve(usable, stored, live, block_tokens=self.capabilities.block_tokens)
        checkpoints = self._resumable(kv_format.namespace, usable, groups, is_default=is_default)
        if turn.problem:  # a tier failed, so skip checkpoints with an unreadable block below them
            readable = self.store.is_readable
            checkpoints = (each for each in checkpoints if all(map(readable, chain(each))))
        if turn.request.exact:
            return resolve_whole_exact(
                stored, checkpoints, step_tokens=self.capabilities.step_tokens
            )
        return resolve_whole(usable, stored, checkpoints, live)

    def match(
        self,
        namespace: bytes,
        tokens: Tokens,
        groups: tuple[bytes, ...] = (),
        *,
        is_default: bool = True,
    ) -> Match:
        """The longest stored match, whether or not a turn can resume from its end.

        Shared state has the default KV type. It is used if it matches more than the tenant's own.
        """
        best = self.store.match(namespace, tokens)
        for shared in (self.shared_namespace, *groups) if is_default else ():
            found = self.store.match(shared, tokens)
            best = found if found.tokens > best.tokens else best
        return best

    def reusable_tokens(
        self,
        namespace: bytes,
        tokens: Tokens,
        groups: tuple[bytes, ...] = (),
        *,
        is_default: bool = True,
    ) -> int:
        """Number of tokens that a turn could reuse from the store."""
        if self.can_truncate:
            return self.match(namespace, tokens, groups, is_default=is_default).tokens
        newest = next(self._resumable(namespace, tokens, groups, is_default=is_default), None)
        return newest.stop if newest else 0

    def resume_points(self, handle: PrefixHandle) -> Iterator[Block]:
        """The blocks of a conversation after which a turn could resume."""
        if self.can_truncate:
            return chain(handle.block)
        is_default = handle.namespace == handle.tenant
        return self._resumable(handle.namespace, handle.tokens, is_default=is_default)

    def _resumable(
        self,
        namespace: bytes,
        tokens: Tokens,
        groups: tuple[bytes, ...] = (),
        *,
        is_default: bool,
    ) -> Iterator[Block]:
        """Blocks with a checkpoint, newest first."""
        shared = {self.shared_namespace, *groups} if is_default else set()
        namespaces = {namespace} | shared
        found = (self.store.checkpoints(each, tokens) for each in namespaces)
        return merge(*found, key=lambda block: -block.stop)


HEADROOM_TOKENS = 64  # cells that are reserved for the reply when a turn starts


@dataclass(frozen=True, slots=True)
class Placed:
    """What a started turn has reused."""

    plan: Plan[Sequence]
    reused_tokens: int
    tier: str | None  # the slowest tier that state came from; None: nothing was reused


class Admission:
    """Takes a turn from its plan to a sequence that holds the reused prefix."""

    def __init__(self, engine: Engine, store: Store, planner: Planner, kv: KvManager) -> None:
        self._sequences = engine.sequences
        self._capabilities = engine.capabilities
        self._store = store
        self._planner = planner
        self._kv = kv
        self._idle = kv.idle

    def plan(self, turn: Turn, running: list[Turn], *, parked: bool = True) -> Plan[Sequence]:
        """Find the longest reusable prefix, and set the KV format that the turn starts with.

        `parked=False` ignores sequences that are parked outside the pool.
        """
        route = self._planner.route(
            turn, lambda kv_format: self._live(turn, kv_format, running, parked)
        )
        turn.kv_format, turn.requantise_at = route.kv_format, route.requantise_at
        may_cut = self._capabilities.can_truncate and not turn.request.exact
        return self._kv.cost_gate.apply(route.plan, may_cut=may_cut)

    def _live(
        self, of: Turn, kv_format: KvFormat, running: list[Turn], parked: bool
    ) -> Iterator[Live[Sequence]]:
        is_default = kv_format.kv_type == self._capabilities.kv_type
        shared = (self._planner.shared_namespace, *of.encoded.groups) if is_default else ()
        allowed = (kv_format.namespace, *shared)
        for turn in running:
            if turn.shares and turn.kv_format.namespace in allowed and turn.sequence:
                yield Live(turn.sequence, turn.tokens.first(turn.held_tokens))
        idle = [idle for idle in self._idle if idle.namespace in allowed]
        idle = [each for each in idle if parked or not each.sequence.is_parked]
        for each in sorted(idle, key=lambda each: each.sequence.is_parked):  # in the pool first
            yield Live(each.sequence, each.tokens, is_copied=each.sequence.is_parked)

    def reserve(
        self, turn: Turn, plan: Plan[Sequence], others: list[Turn]
    ) -> Plan[Sequence] | None:
        """Reserve cells so that this turn and the others can finish their prompts.

        Returns the plan to carry out, or None if there is no room now. Nothing is evicted unless
        that makes enough room.
        """
        if turn.request.exact:
            return plan
        idle, kv_type = self._idle.of(turn.kv_format.kv_type), turn.kv_format.kv_type
        shared = [other for other in others if other.cells_in(kv_type)]
        tokens = len(turn.tokens)
        if turn.requantise_at is not None:
            tokens = min(tokens, turn.requantise_at)
        headroom = min(turn.output.remaining_tokens, HEADROOM_TOKENS)
        is_parked = plan.share is not None and plan.share.is_parked
        if plan.share is not None and is_parked:
            tokens = max(tokens, plan.share.length)  # it is copied whole and truncated afterwards
        needed = tokens - self._tokens_in_place(turn, plan) + headroom
        needed += _wanted_tokens(shared, kv_type)
        max_idle = self._kv.max_sequences - len(shared) - 1
        if not shared and (plan.blocks or is_parked):
            idle.park_fragments(plan.share)
        if idle.could_make_room(needed, max_idle, plan.share):
            return plan if idle.make_room(needed, max_idle, plan.share) else None
        if is_parked:  # try again without the copy of the parked sequence
            running = [each for each in others if not each.restoration and not each.requantisation]
            return self.reserve(turn, self.plan(turn, running, parked=False), others)
        if others:
            return None
        has_room = idle.make_room(len(turn.tokens) + HEADROOM_TOKENS, max_idle)
        if not has_room and len(idle):
            return None  # the next step evicts more
        return self.plan(turn, others, parked=False)  # the planned source may be evicted

    def _tokens_in_place(self, turn: Turn, plan: Plan[Sequence]) -> int:
        """Number of prompt tokens that reuse existing cells.

        A parked source has to be copied. If sequences cannot share cells, only a source that the
        turn takes over is reused in place.
        """
        if plan.share is None or plan.share.is_parked:
            return 0
        if self._capabilities.shares_cells:
            return plan.shared_tokens
        idle, namespace = self._idle.of(turn.kv_format.kv_type), turn.kv_format.namespace
        takes_over = idle.supersedes(plan.share, plan.shared_tokens, namespace)
        return plan.shared_tokens if takes_over else 0

    def place(self, turn: Turn, plan: Plan[Sequence]) -> None:
        """Give the turn a sequence with the shared prefix. The restorer adds the stored blocks."""
        kv_format, source, shared_tokens = turn.kv_format, plan.share, plan.shared_tokens
        turn.offloaded = Offloaded(0, kv_format.namespace)
        idle = self._idle.of(kv_format.kv_type)
        if source is not None and idle.supersede(source, shared_tokens, kv_format.namespace):
            turn.sequence = source
        else:
            turn.sequence = self._sequences.open(
                exact=turn.request.exact, kv_type=kv_format.kv_type
            )
            if source is not None:
                self._sequences.share(source, shared_tokens, turn.sequence)
        turn.restoration = self._kv.restorer.begin(plan)

    def placed(self, turn: Turn) -> Placed | None:
        """Return what the turn has reused, after restoring has ended.

        None: its checkpoint is gone, so it has to be planned again.
        """
        restoration, sequence = turn.restoration, turn.sequence
        assert restoration is not None
        assert sequence is not None
        turn.restoration, plan = None, restoration.plan
        turn.problem = restoration.problem or turn.problem
        turn.plans += 1
        if not self._truncate(turn, sequence, plan) and turn.plans < 3:  # else it starts at 0
            self._sequences.close(sequence)
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
        """Requantise a turn's state within the step's budget. Returns True when it is complete.

        Raises NoMemory.
        """
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
        if not self._copy(requantisation, target.kv_type):
            return False
        turn.sequence, turn.kv_format = requantisation.into, target
        turn.requantisation = turn.requantise_at = None
        turn.offloaded = Offloaded(0, target.namespace)
        return True

    def _copy(self, requantisation: Requantisation, kv_type: KvType) -> bool:
        """Copy the sequence block by block. Returns True when its source is closed."""
        source = requantisation.source
        try:
            if requantisation.into is None:
                requantisation.into = self._sequences.open(exact=source.exact, kv_type=kv_type)
            while requantisation.into.length < source.length:
                if self._kv.budget.is_spent:
                    return False
                self._copy_block(source, requantisation.into)
        except PoolFull:
            return False  # wait until other turns end
        self._sequences.close(source)
        return True

    def _copy_block(self, source: Sequence, into: Sequence) -> None:
        start = into.length
        stop = min(start + self._capabilities.block_tokens, source.length)
        resumable = stop == source.length and not self._capabilities.can_truncate
        blob = self._sequences.export(source, start, stop, resumable=resumable)
        small = self._sequences.requantise(
            blob, stop - start, source.kv_type, into.kv_type, resumable=resumable
        )
        self._sequences.restore(into, small, stop - start, resumable=resumable)
        self._kv.counts.requantised_bytes += len(blob)
        self._kv.counts.requantised_tokens += stop - start

    def _truncate(self, turn: Turn, sequence: Sequence, plan: Plan[Sequence]) -> bool:
        """Truncate to where the turn can resume. False: the planned checkpoint is gone."""
        is_whole = sequence.length >= plan.reused_tokens
        if is_whole:
            keep = plan.reused_tokens
        elif not self._capabilities.can_truncate:
            keep = 0
        else:
            keep = self._whole_steps(turn, sequence.length)
        self._sequences.truncate(sequence, keep)
        return is_whole or self._capabilities.can_truncate

    def _whole_steps(self, turn: Turn, tokens: int) -> int:
        """The last position up to `tokens` that splits no canonical step of an exact turn, and no
        image that must be computed whole."""
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
            places.add(plan.matched_tokens)  # conversations diverge here, and more may follow
        return places


def _wanted_tokens(turns: list[Turn], kv_type: KvType) -> int:
    """Cells that these turns need for the rest of their prompts and for their headroom."""
    return sum(turn.wanted_tokens(kv_type, HEADROOM_TOKENS) for turn in turns)
