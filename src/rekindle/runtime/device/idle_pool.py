"""Finished sequences that stay in the engine's memory, and how they make room again.

Where the engine can park, a sequence leaves the pool for the device's other memory as soon as a
turn runs beside it, and leaves that one, for the store, when others want its place.

Whatever is exported here is exported within the step's allowance: a sequence that takes longer is
gone on with at the next step, and is of use to turns until it is closed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain

from rekindle.engine.base import Engine, KvType, Sequence
from rekindle.kvcache.block import PrefixHandle
from rekindle.kvcache.eviction.policy import Evictor
from rekindle.runtime.device.idle_sequences import IdleRanking, IdleSequences
from rekindle.runtime.device.offload import (
    Allowance,
    AskedExports,
    IdleExports,
    IdleSequence,
    Offloader,
)
from rekindle.tokens import Tokens

#: Rows that others compute beside an idle sequence on a CPU for as much time as restoring it would
#: take: every row passes over its cells, so that both grow with its length (decision 6).
ROWS_WORTH_A_RESTORE = 8
FEW_TOKENS = 4096  # of idle state in the pool, that makes way for state that is copied into it


class IdlePool:
    """Sequences of one KV type, within so many sequences and tokens; the store's policy says which
    go first."""

    def __init__(
        self,
        engine: Engine,
        offloader: Offloader,
        allowance: Allowance,
        evictor: Evictor,
        *,
        kv_type: KvType,
        most_sequences: int,
        most_tokens: int,
        by_cost: bool,
    ) -> None:
        self._engine = engine
        self.kv_type = kv_type
        self._allowance = allowance
        self._most_sequences = most_sequences
        self.most_tokens = most_tokens
        self._by_cost = by_cost  # a sequence leaves, too, when it costs others more than its return
        is_usual = kv_type == engine.capabilities.kv_type
        self._parking = engine.sequences.parking if is_usual else None
        self._ranking = IdleRanking(evictor, engine.capabilities.block_tokens)
        self._exports = IdleExports(engine, offloader, allowance, kv_type)
        self.sequences = self._idle = IdleSequences(engine, self._exports, self._ranking)
        self._superseded = self._idle.superseded
        self._asked = AskedExports(self._exports)

    def __len__(self) -> int:
        return len(self._idle)

    def __iter__(self) -> Iterator[IdleSequence]:
        return iter(self._idle)

    def add(self, idle: IdleSequence) -> None:
        self._idle.add(idle)
        self.trim()

    # -- making room ---------------------------------------------------------------------------

    def could_make_room(self, tokens: int, sequences: int, spared: Sequence | None) -> bool:
        """Whether so many cells would be free if all of these left but the spared one, and no more
        than so many sequences were here."""
        mine = [idle.sequence for idle in self._idle if idle.sequence is not spared]
        copied = self._exports.copied
        copies = [copied.copy] if copied and copied.copy else []
        freed_tokens = self._engine.sequences.freed_tokens([*mine, *copies])
        free_tokens = self._engine.sequences.free_tokens(self.kv_type) + freed_tokens
        return len(self) - len(mine) <= sequences and free_tokens >= tokens

    def make_room(self, tokens: int, sequences: int, spared: Sequence | None = None) -> bool:
        """Move sequences out of the pool until so many cells are free, and no more than so many
        sequences are here; False: there are no more, or the step's allowance is spent."""
        if not self._keep(sequences, spared):
            return False
        if self._engine.sequences.free_tokens(self.kv_type) < tokens:
            self._exports.close_copy()
        while self._engine.sequences.free_tokens(self.kv_type) < tokens:
            others = (each for each in self._idle.in_pool if each.sequence is not spared)
            victim = next(self._ranking.in_order(others), None)
            if victim is None or not self._move_out(victim, spared):
                return False
        return True

    def _keep(self, sequences: int, spared: Sequence | None = None) -> bool:
        """No more than so many; False: the allowance did not do."""
        if len(self) + len(self._superseded) > sequences:
            self._superseded.close()
        while len(self) > sequences:
            others = [each for each in self._idle if each.sequence is not spared]
            if not others or self._allowance.is_spent:
                return False
            victim = next(filter(self._exports.can_leave, self._ranking.in_order(others)), None)
            if victim is None:  # there is no room to export any: it is computed again
                self._idle.close(next(self._ranking.in_order(others)))
            elif not self._evict(victim):
                return False
        return True

    @property
    def is_in_pool(self) -> bool:
        """Whether any of them holds cells."""
        return self._exports.copied is not None or next(self._idle.in_pool, None) is not None

    def _move_out(self, idle: IdleSequence, spared: Sequence | None = None) -> bool:
        """Out of the pool: park a sequence, or else export and close it. False: the allowance did
        not do."""
        parking = self._parking
        self._exports.gather(idle)
        if not idle.tokens:
            self._idle.close(idle)
            return True
        if parking is None or idle.is_leaving or len(idle.tokens) > parking.tokens:
            return self._evict(idle)
        while not parking.park(idle.sequence):
            if self._superseded.close():
                continue
            parked = (each for each in self._idle if each.sequence.is_parked)
            others = (each for each in parked if each.sequence is not spared)
            victim = next(filter(self._exports.can_leave, self._ranking.in_order(others)), None)
            if victim is None:
                return self._evict(idle)
            if not self._evict(victim):
                return False
        return True

    def trim(self, rows_ahead: int = 0) -> bool:
        """Idle state in the pool slows every step down a little; keep it within its share, and to
        what is worth its place while so many rows are computed. False: the next step goes on."""
        if not self._keep(self._most_sequences):
            return False
        if not self.is_in_pool:
            return True
        while sum(len(each.tokens) for each in self._idle.in_pool) > self.most_tokens:
            if not self._move_out(next(self._ranking.in_order(self._idle.in_pool))):
                return False
        if self._parking and rows_ahead:
            self._exports.close_spare_copy()
            return all(self._move_out(idle) for idle in list(self._idle.in_pool))
        if self._parking:
            return True
        return not self._by_cost or all(self._weigh(idle, rows_ahead) for idle in list(self._idle))

    def park_few(self, spared: Sequence | None) -> None:
        """Park what is idle in the pool if that is little and there is room for it. State that is
        copied into cells between those of a few replies is copied run by run, which takes many
        times as long."""
        mine = [idle for idle in self._idle.in_pool if idle.sequence is not spared]
        if self._parking is None or sum(len(idle.tokens) for idle in mine) > FEW_TOKENS:
            return
        self._exports.close_spare_copy()
        for idle in mine:
            self._exports.gather(idle)
            if not idle.tokens:
                self._idle.close(idle)
            elif not idle.is_leaving:
                self._parking.park(idle.sequence)

    def _weigh(self, idle: IdleSequence, rows_ahead: int) -> bool:
        """Let a sequence stay or go; its state is in the store either way, so that it can go at
        once. False: the allowance did not do."""
        if idle.rows_meanwhile + rows_ahead <= ROWS_WORTH_A_RESTORE:
            return self._exports.export(idle)
        return self._evict(idle)

    def evict_unused(self) -> None:
        """Let those leave that were here at the last call, too, as far as the step allows."""
        for idle in list(self._idle):
            if idle.is_unused:
                self._evict(idle)
            idle.is_unused = True

    def _evict(self, idle: IdleSequence) -> bool:
        """Export a sequence and close it; False: the allowance did not do."""
        idle.is_leaving = True
        if not self._exports.export(idle):
            return False
        self._idle.close(idle)
        return True

    def forget(self, handle: PrefixHandle) -> None:
        """Close sequences of a conversation that was deleted: it is not reused from here."""
        self._superseded.close()
        for idle in list(self._idle):
            if idle.namespace == handle.namespace and _is_along(handle.tokens, idle.tokens):
                self._exports.gather(idle)
                if len(idle.tokens) > len(handle.tokens):
                    self._exports.export_at_once(idle)  # a longer conversation may rest on it
                self._idle.close(idle, may_return=False)

    # -- exporting -----------------------------------------------------------------------------

    def use_moment(self) -> bool:
        """For idle moments: copy one block to the store, or park what is not the newest; False when
        there is nothing left to do."""
        for idle in self._idle.in_pool:
            self._exports.cut(idle)  # all, before the first is computed again
        newest_first = reversed(self._idle)  # the newest is the likeliest to be asked for
        return (
            self._superseded.close()
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
        self._exports.gather(idle, computes=True)
        if not idle.tokens:
            self._idle.close(idle)
            return True
        return self._parking.park(idle.sequence)

    def export_all(self) -> None:
        self._superseded.close()
        for idle in [*self._idle.in_pool, *self._idle]:
            for exported in list(self._idle.in_pool):
                if self._exports.can_leave(idle):
                    break
                self._idle.close(exported)  # for its cells
            if idle in self._idle:
                self._exports.export_at_once(idle)

    def export(self, handle: PrefixHandle, then: Callable[[], None]) -> None:
        """Call back when the state of a conversation that is here is in the store, and nothing
        else's."""
        mine = [idle for idle in self._idle if idle.namespace == handle.namespace]
        common = [idle.tokens.common_prefix(handle.tokens) for idle in mine]
        longest = max(common, default=0)
        if longest > (handle.block.stop if handle.block else 0):
            self._asked.ask(mine[common.index(longest)], longest, then)
            self.export_asked()
        else:
            then()

    def export_asked(self) -> bool:
        """Go on with what somebody waits for; False: the next step goes on."""
        while not self._asked.go_on(self._idle):
            if self._allowance.is_spent:
                return False
            idle = self._asked.first  # there is no room for a copy of it
            wanted = len(idle.tokens), len(self), idle.sequence
            if not self.could_make_room(*wanted) or not self.make_room(*wanted):
                return False
        return True


def _is_along(one: Tokens, other: Tokens) -> bool:
    """Whether one of the two is the beginning of the other."""
    return one.common_prefix(other) == min(len(one), len(other))


# ----------------------------------------------------------------------
# Idle sequences of every KV type: each type's lie in a pool of their own.

RowsByType = Counter[KvType]


class IdlePools:
    """The pool of the usual type is always there, others since they were first wanted."""

    def __init__(self, usual: KvType, build: Callable[[KvType], IdlePool]) -> None:
        self._build = build
        self.usual = build(usual)
        self._pools: dict[KvType, IdlePool] = {usual: self.usual}

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
        """Whether a turn may go on in the source itself."""
        return self.of(source.kv_type).sequences.supersede(source, shared_tokens, namespace)

    def clear(self) -> None:
        for pool in self._pools.values():
            pool.sequences.clear()

    @property
    def is_in_pool(self) -> bool:
        return any(pool.is_in_pool for pool in self._pools.values())

    def trim(self, rows_ahead: RowsByType) -> bool:
        return all(pool.trim(rows_ahead[name]) for name, pool in self._pools.items())

    def count_rows(self, rows: RowsByType) -> None:
        for kv_type, pool in self._pools.items():
            pool.sequences.count_rows(rows[kv_type])

    def release_unused(self) -> None:
        """Let sequences of other types leave that nobody has continued since the last call, so that
        the engine can give their pool back."""
        for pool in self._pools.values():
            if pool is not self.usual:
                pool.evict_unused()

    def forget(self, handle: PrefixHandle) -> None:
        for pool in self._pools.values():
            pool.forget(handle)

    def use_moment(self) -> bool:
        return any(pool.use_moment() for pool in self._pools.values())

    def export_all(self) -> None:
        for pool in self._pools.values():
            pool.export_all()

    def export(self, handle: PrefixHandle, then: Callable[[], None]) -> None:
        """Call back when the state of a conversation that is here is in the store."""
        mine = (idle.sequence.kv_type for idle in self if idle.namespace == handle.namespace)
        self.of(next(mine, self.usual.kv_type)).export(handle, then)

    def export_asked(self) -> bool:
        return all(pool.export_asked() for pool in self._pools.values())
