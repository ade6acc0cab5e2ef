"""Keeps finished sequences in the engine's memory and frees them when it is needed.

If the engine can park, an idle sequence moves from the pool to other device memory as soon as a
turn runs. It moves on to the store when that memory is full. Without parking it moves from the pool
to the store.

Exports stay within the step budget. An export that takes longer continues in the next step, and the
sequence can be reused until it is closed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from rekindle.engine.base import Engine, KvType, Sequence
from rekindle.kvcache.block import PrefixHandle
from rekindle.kvcache.eviction.policy import Evictor
from rekindle.runtime.device.idle_sequences import IdleRanking, IdleSequences
from rekindle.runtime.device.offload import (
    FlushRequests,
    IdleSequence,
    Offloader,
    OffloadQueue,
    StepBudget,
)
from rekindle.tokens import Tokens

# On a CPU, every row that is computed passes over all idle cells. After this many rows an idle
# sequence has cost as much time as restoring it would. Both grow with its length (decision 6).
ROWS_WORTH_A_RESTORE = 8
# Idle state of at most this many tokens is parked before other state is copied into the pool.
MAX_FRAGMENT_TOKENS = 4096


class IdlePool:
    """Idle sequences of one KV type, limited in number and tokens."""

    def __init__(
        self,
        engine: Engine,
        offloader: Offloader,
        budget: StepBudget,
        evictor: Evictor,
        *,
        kv_type: KvType,
        max_sequences: int,
        max_tokens: int,
        by_cost: bool,
    ) -> None:
        self._engine = engine
        self.kv_type = kv_type
        self._budget = budget
        self._most_sequences = max_sequences
        self.max_tokens = max_tokens
        self._by_cost = by_cost  # evict a sequence when keeping it costs more than restoring it
        is_default = kv_type == engine.capabilities.kv_type
        self._parking = engine.sequences.parking if is_default else None
        self._ranking = IdleRanking(evictor, engine.capabilities.block_tokens)
        self._exports = OffloadQueue(engine, offloader, budget, kv_type)
        self.sequences = self._idle = IdleSequences(engine, self._exports, self._ranking)
        self._deferred = self._idle.deferred
        self._flushes = FlushRequests(self._exports)

    def __len__(self) -> int:
        return len(self._idle)

    def __iter__(self) -> Iterator[IdleSequence]:
        return iter(self._idle)

    def add(self, idle: IdleSequence) -> None:
        self._idle.add(idle)
        self.trim()

    # -- making room ---------------------------------------------------------------------------

    def could_make_room(self, tokens: int, sequences: int, excluded: Sequence | None) -> bool:
        """Whether evicting every sequence except `excluded` would free this many cells and leave at
        most this many sequences."""
        mine = [idle.sequence for idle in self._idle if idle.sequence is not excluded]
        copied = self._exports.copied
        copies = [copied.copy] if copied and copied.copy else []
        freed_tokens = self._engine.sequences.freed_tokens([*mine, *copies])
        free_tokens = self._engine.sequences.free_tokens(self.kv_type) + freed_tokens
        return len(self) - len(mine) <= sequences and free_tokens >= tokens

    def make_room(self, tokens: int, sequences: int, excluded: Sequence | None = None) -> bool:
        """Move sequences out of the pool until `tokens` cells are free and at most `sequences` are
        left. Returns False if no more can leave, or the step budget is spent."""
        if not self._limit_sequences(sequences, excluded):
            return False
        if self._engine.sequences.free_tokens(self.kv_type) < tokens:
            self._exports.close_copy()
        while self._engine.sequences.free_tokens(self.kv_type) < tokens:
            others = (each for each in self._idle.in_pool if each.sequence is not excluded)
            victim = next(self._ranking.eviction_order(others), None)
            if victim is None or not self._move_out(victim, excluded):
                return False
        return True

    def _limit_sequences(self, sequences: int, excluded: Sequence | None = None) -> bool:
        """Evict down to this many sequences. Returns False if the budget is spent."""
        if len(self) + len(self._deferred) > sequences:
            self._deferred.close()
        while len(self) > sequences:
            others = [each for each in self._idle if each.sequence is not excluded]
            if not others or self._budget.is_spent:
                return False
            victim = self._next_victim(others)
            if victim is None:  # no copy fits into the pool, so one is dropped without an export
                self._idle.close(next(self._ranking.eviction_order(others)))
            elif not self._evict(victim):
                return False
        return True

    def _next_victim(self, candidates: Iterable[IdleSequence]) -> IdleSequence | None:
        ordered = self._ranking.eviction_order(candidates)
        return next(filter(self._exports.can_leave, ordered), None)

    @property
    def holds_cells(self) -> bool:
        """Whether any of them holds cells of the pool."""
        return self._exports.copied is not None or next(self._idle.in_pool, None) is not None

    def _move_out(self, idle: IdleSequence, excluded: Sequence | None = None) -> bool:
        """Park a sequence, or export and close it. Returns False if the budget is spent."""
        parking = self._parking
        self._exports.drop_or_recompute(idle)
        if not idle.tokens:
            self._idle.close(idle)
            return True
        if parking is None or idle.is_evicting or len(idle.tokens) > parking.tokens:
            return self._evict(idle)
        while not parking.park(idle.sequence):
            if self._deferred.close():
                continue
            parked = (each for each in self._idle if each.sequence.is_parked)
            others = (each for each in parked if each.sequence is not excluded)
            victim = self._next_victim(others)
            if victim is None:
                return self._evict(idle)
            if not self._evict(victim):
                return False
        return True

    def trim(self, rows_ahead: int = 0) -> bool:
        """Keep idle state within its limits, because it slows every step down. `rows_ahead` is the
        number of rows that are about to be computed. Returns False if the next step has to
        continue."""
        if not self._limit_sequences(self._most_sequences):
            return False
        if not self.holds_cells:
            return True
        while sum(len(each.tokens) for each in self._idle.in_pool) > self.max_tokens:
            if not self._move_out(next(self._ranking.eviction_order(self._idle.in_pool))):
                return False
        if self._parking and rows_ahead:
            self._exports.close_spare_copy()
            return all(self._move_out(idle) for idle in list(self._idle.in_pool))
        if self._parking:
            return True
        return not self._by_cost or all(
            self._stay_or_leave(idle, rows_ahead) for idle in list(self._idle)
        )

    def park_fragments(self, excluded: Sequence | None) -> None:
        """Park a small amount of idle state, if there is room for it. State that is restored
        between the cells of a few replies is copied run by run, which is many times slower."""
        mine = [idle for idle in self._idle.in_pool if idle.sequence is not excluded]
        if self._parking is None or sum(len(idle.tokens) for idle in mine) > MAX_FRAGMENT_TOKENS:
            return
        self._exports.close_spare_copy()
        for idle in mine:
            self._exports.drop_or_recompute(idle)
            if not idle.tokens:
                self._idle.close(idle)
            elif not idle.is_evicting:
                self._parking.park(idle.sequence)

    def _stay_or_leave(self, idle: IdleSequence, rows_ahead: int) -> bool:
        """Evict a sequence that has cost more than restoring it would, and export any other, so
        that it can be evicted quickly. Returns False if the budget is spent."""
        if idle.rows_since_idle + rows_ahead <= ROWS_WORTH_A_RESTORE:
            return self._exports.export(idle)
        return self._evict(idle)

    def evict_unused(self) -> None:
        """Evict sequences that were not used since the last call, within the step budget."""
        for idle in list(self._idle):
            if idle.is_unused:
                self._evict(idle)
            idle.is_unused = True

    def _evict(self, idle: IdleSequence) -> bool:
        """Export a sequence and close it. Returns False if the budget is spent."""
        idle.is_evicting = True
        if not self._exports.export(idle):
            return False
        self._idle.close(idle)
        return True

    def forget(self, handle: PrefixHandle) -> None:
        """Close the sequences of a deleted conversation, so that they are not reused."""
        self._deferred.close()
        for idle in list(self._idle):
            if idle.namespace == handle.namespace and _is_along(handle.tokens, idle.tokens):
                self._exports.drop_or_recompute(idle)
                if len(idle.tokens) > len(handle.tokens):
                    self._exports.export_all_of(idle)  # a longer conversation may need it
                self._idle.close(idle, may_return=False)

    # -- exporting -----------------------------------------------------------------------------

    def work_in_idle_moment(self) -> bool:
        """Close a deferred sequence, export one block, or park a sequence that is not the newest.
        Returns False if there is nothing left to do."""
        for idle in self._idle.in_pool:
            self._exports.drop_scattered(idle)  # all of them, before any is computed again
        newest_first = reversed(self._idle)  # the newest is the most likely to be resumed
        return (
            self._deferred.close()
            or any(map(self._exports.export_block, newest_first))
            or self._park_one()
        )

    def _park_one(self) -> bool:
        if self._parking is None:
            return False
        newest = next(reversed(self._idle), None)
        others = (idle for idle in self._idle.in_pool if idle is not newest)
        idle = next(others, None)
        if idle is None:
            return False
        self._exports.drop_or_recompute(idle, computes=True)
        if not idle.tokens:
            self._idle.close(idle)
            return True
        return self._parking.park(idle.sequence)

    def export_all(self) -> None:
        self._deferred.close()
        for idle in [*self._idle.in_pool, *self._idle]:
            for exported in list(self._idle.in_pool):
                if self._exports.can_leave(idle):
                    break
                self._idle.close(exported)  # to free its cells for a copy
            if idle in self._idle:
                self._exports.export_all_of(idle)

    def export(self, handle: PrefixHandle, then: Callable[[], None]) -> None:
        """Export the idle state of one conversation, then call back."""
        mine = [idle for idle in self._idle if idle.namespace == handle.namespace]
        common = [idle.tokens.common_prefix(handle.tokens) for idle in mine]
        longest = max(common, default=0)
        if longest > (handle.block.stop if handle.block else 0):
            self._flushes.ask(mine[common.index(longest)], longest, then)
            self.continue_flushes()
        else:
            then()

    def continue_flushes(self) -> bool:
        """Continue exports that somebody waits for. Returns False if the budget is spent."""
        while not self._flushes.advance(self._idle):
            if self._budget.is_spent:
                return False
            idle = self._flushes.first  # a copy of it does not fit
            wanted = len(idle.tokens), len(self), idle.sequence
            if not self.could_make_room(*wanted) or not self.make_room(*wanted):
                return False
        return True


def _is_along(one: Tokens, other: Tokens) -> bool:
    """Whether one of the two is a prefix of the other."""
    return one.common_prefix(other) == min(len(one), len(other))


RowsByType = Counter[KvType]


class IdlePools:
    """The idle pool of every KV type that is in use."""

    def __init__(self, default: KvType, build: Callable[[KvType], IdlePool]) -> None:
        self._build = build
        self.default = build(default)
        self._pools: dict[KvType, IdlePool] = {default: self.default}

    def __len__(self) -> int:
        return sum(map(len, self._pools.values()))

    def __iter__(self) -> Iterator[IdleSequence]:
        return chain(*self._pools.values())

    def of(self, kv_type: KvType) -> IdlePool:
        if kv_type not in self._pools:
            self._pools[kv_type] = self._build(kv_type)
        return self._pools[kv_type]

    def add(self, idle: IdleSequence) -> None:
        self.of(idle.sequence.kv_type).add(idle)

    def supersede(self, source: Sequence, shared_tokens: int, namespace: bytes) -> bool:
        """Resume a turn from an idle sequence. Returns True if the turn takes it over."""
        return self.of(source.kv_type).sequences.supersede(source, shared_tokens, namespace)

    def clear(self) -> None:
        for pool in self._pools.values():
            pool.sequences.clear()

    @property
    def holds_cells(self) -> bool:
        return any(pool.holds_cells for pool in self._pools.values())

    def trim(self, rows_ahead: RowsByType) -> bool:
        return all(pool.trim(rows_ahead[name]) for name, pool in self._pools.items())

    def count_rows(self, rows: RowsByType) -> None:
        for kv_type, pool in self._pools.items():
            pool.sequences.count_rows(rows[kv_type])

    def release_unused(self) -> None:
        """Evict unused sequences of other KV types, so that the engine can free their pools."""
        for pool in self._pools.values():
            if pool is not self.default:
                pool.evict_unused()

    def forget(self, handle: PrefixHandle) -> None:
        for pool in self._pools.values():
            pool.forget(handle)

    def work_in_idle_moment(self) -> bool:
        return any(pool.work_in_idle_moment() for pool in self._pools.values())

    def export_all(self) -> None:
        for pool in self._pools.values():
            pool.export_all()

    def export(self, handle: PrefixHandle, then: Callable[[], None]) -> None:
        """Export the idle state of one conversation, then call back."""
        mine = (idle.sequence.kv_type for idle in self if idle.namespace == handle.namespace)
        self.of(next(mine, self.default.kv_type)).export(handle, then)

    def continue_flushes(self) -> bool:
        return all(pool.continue_flushes() for pool in self._pools.values())
