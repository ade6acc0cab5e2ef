"""Keeps finished sequences in the engine's memory and frees them when it is needed.

If the engine can park, an idle sequence moves from the pool to other device memory as soon as a
turn runs. It moves on to the store when that memory is full. Without parking it moves from the pool
to the store.

Exports stay within the step budget. An export that takes longer continues in the next step, and the
sequence can be reused until it is closed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from rekindle.engine.base import Engine, KvType, Sequence
from rekindle.kvcache.block import PrefixHandle, chain_key
from rekindle.kvcache.eviction.policy import Evictor
from rekindle.runtime.device.offload import IdleSequence, Offloader

# On a CPU, every row that is computed passes over all idle cells. After this many rows an idle
# sequence has cost as much time as restoring it would. Both grow with its length (decision 6).
ROWS_WORTH_A_RESTORE = 8
# Idle state of at most this many tokens is parked before other state is copied into the pool.
MAX_FRAGMENT_TOKENS = 4096


class IdleRanking:
    """Ranks idle sequences with the eviction policy of the store.

    The policy counts the blocks of sequences like the blocks of any tier, so it recognises a
    conversation that continues or returns. A sequence is ranked by the middle one of the blocks
    that no other sequence has. Its last block is new after every turn, and its first blocks are
    shared with many conversations.

    Pins do not matter here. They keep state in the store, and whatever is there may leave the
    engine.
    """

    def __init__(self, evictor: Evictor, block_tokens: int) -> None:
        self._evictor = evictor  # counts tokens
        self._block_tokens = block_tokens
        # The keys and lengths of the blocks of each sequence. The last one may be short.
        self._parts: dict[IdleSequence, list[tuple[bytes, int]]] = {}
        self._users: Counter[bytes] = Counter()  # number of sequences that have a block

    def add(self, idle: IdleSequence) -> None:
        parts = self._parts[idle] = list(self._cut(idle))
        for key, tokens in parts:
            if self._users[key]:
                self._evictor.use(idle.tenant, key)
            else:
                self._evictor.add(idle.tenant, key, None, tokens)
            self._users[key] += 1

    def _cut(self, idle: IdleSequence) -> Iterator[tuple[bytes, int]]:
        key = idle.tenant + idle.namespace
        for start in range(0, len(idle.tokens), self._block_tokens):
            tokens = idle.tokens[start : start + self._block_tokens]
            key = chain_key(key, tokens)
            yield key, len(tokens)

    def remove(self, idle: IdleSequence, *, may_return: bool = True) -> None:
        leave = self._evictor.evict if may_return else self._evictor.remove
        for key, tokens in reversed(self._parts.pop(idle)):
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                leave(idle.tenant, key, tokens)

    def clear(self) -> None:
        for idle in list(self._parts):
            self.remove(idle)

    def eviction_order(self, candidates: Iterable[IdleSequence]) -> Iterator[IdleSequence]:
        """Yield the next victims: sequences whose eviction has begun, then by the policy."""
        left = list(candidates)
        while left:
            marks = {self._mark(idle): idle for idle in reversed(left)}
            leaving = next((idle for idle in left if idle.is_evicting), None)
            key = None if leaving else self._evictor.next_victim(_AllBut(marks.keys()))
            idle = leaving or (left[0] if key is None else marks[key])
            left.remove(idle)
            yield idle

    def _mark(self, idle: IdleSequence) -> bytes:
        """Return the block that a sequence is ranked by."""
        keys = [key for key, _ in self._parts[idle]]
        own = [key for key in keys if self._users[key] == 1] or keys[-1:]
        return own[len(own) // 2]


class _AllBut:
    def __init__(self, keys: Iterable[bytes]) -> None:
        self._keys = frozenset(keys)

    def __contains__(self, key: object) -> bool:
        return key not in self._keys


class IdlePool:
    """Idle sequences of one KV type, limited in number and tokens."""

    def __init__(
        self,
        engine: Engine,
        offloader: Offloader,
        evictor: Evictor,
        *,
        kv_type: KvType,
        max_sequences: int,
        max_tokens: int,
        by_cost: bool,
    ) -> None:
        self._engine = engine
        self.kv_type = kv_type
        self._most_sequences = max_sequences
        self.max_tokens = max_tokens
        self._by_cost = by_cost  # evict a sequence when keeping it costs more than restoring it
        is_default = kv_type == engine.capabilities.kv_type
        self._parking = engine.sequences.parking if is_default else None
        self._ranking = IdleRanking(evictor, engine.capabilities.block_tokens)
        self._exports = offloader
        self._idle: list[IdleSequence] = []  # in LRU order, each is ranked while it is here
        # Parked sequences that a turn has resumed in the pool and that nobody needs any more.
        # Freeing device memory takes milliseconds. To keep them out of the time to first token,
        # these sequences are closed in an idle moment or when their memory is needed.
        self.deferred: list[Sequence] = []
        # Exports that somebody waits for: the sequence, how many of its tokens, and what follows.
        self._flushes: deque[tuple[IdleSequence, int, Callable[[], None]]] = deque()

    def __len__(self) -> int:
        return len(self._idle)

    def __iter__(self) -> Iterator[IdleSequence]:
        return iter(self._idle)

    @property
    def _in_pool(self) -> Iterator[IdleSequence]:
        """Sequences that are not parked, so they hold cells of the pool."""
        return (idle for idle in self._idle if not idle.sequence.is_parked)

    def add(self, idle: IdleSequence) -> None:
        self._idle.append(idle)
        self._ranking.add(idle)
        self.trim()

    def _close(self, idle: IdleSequence, *, may_return: bool = True) -> None:
        self._exports.close_copy(idle)
        self._idle.remove(idle)
        self._ranking.remove(idle, may_return=may_return)
        self._engine.sequences.close(idle.sequence)

    def _close_deferred(self) -> bool:
        """Returns False if there were none."""
        sequences, self.deferred = self.deferred, []
        for sequence in sequences:
            self._engine.sequences.close(sequence)
        return bool(sequences)

    def supersedes(self, source: Sequence, shared_tokens: int, namespace: bytes) -> bool:
        """Whether a turn that shares this prefix makes its source useless. It does if it shares all
        of the source, and belongs to the same tenant."""
        return any(
            idle.sequence is source
            and shared_tokens >= len(idle.tokens)
            and idle.namespace == namespace
            for idle in self._idle
        )

    def supersede(self, source: Sequence, shared_tokens: int, namespace: bytes) -> bool:
        """Resume a turn from an idle sequence. Returns True if the turn takes the sequence itself.

        It takes a source that is of no other use, because tagging its cells for another sequence
        and untagging them takes milliseconds. A parked source has to be copied.
        """
        is_over = self.supersedes(source, shared_tokens, namespace)
        for idle in self._idle:
            if idle.sequence is source:
                self._idle.remove(idle)
                if not is_over:
                    idle.is_evicting = False
                    self._idle.append(idle)
                    return False
                self._ranking.remove(idle)
                self._exports.close_copy(idle)
                if source.is_parked:
                    self.deferred.append(source)
                return not source.is_parked
        return False

    def clear(self) -> None:
        """Drop all handles after the engine has lost its sequences."""
        self._idle.clear()
        self.deferred.clear()
        self._ranking.clear()
        self._exports.copied = None

    def count_rows(self, rows: int) -> None:
        """Count rows that other turns computed while these sequences were idle."""
        for idle in self._idle:
            idle.rows_since_idle += rows

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
            others = (each for each in self._in_pool if each.sequence is not excluded)
            victim = next(self._ranking.eviction_order(others), None)
            if victim is None or not self._move_out(victim, excluded):
                return False
        return True

    def _limit_sequences(self, sequences: int, excluded: Sequence | None = None) -> bool:
        """Evict down to this many sequences. Returns False if the budget is spent."""
        if len(self) + len(self.deferred) > sequences:
            self._close_deferred()
        while len(self) > sequences:
            others = [each for each in self._idle if each.sequence is not excluded]
            if not others or self._exports.budget.is_spent:
                return False
            victim = self._next_victim(others)
            if victim is None:  # no copy fits into the pool, so one is dropped without an export
                self._close(next(self._ranking.eviction_order(others)))
            elif not self._evict(victim):
                return False
        return True

    def _next_victim(self, candidates: Iterable[IdleSequence]) -> IdleSequence | None:
        ordered = self._ranking.eviction_order(candidates)
        return next(filter(self._exports.can_leave, ordered), None)

    @property
    def holds_cells(self) -> bool:
        """Whether any of them holds cells of the pool."""
        return self._exports.copied is not None or next(self._in_pool, None) is not None

    def _move_out(self, idle: IdleSequence, excluded: Sequence | None = None) -> bool:
        """Park a sequence, or export and close it. Returns False if the budget is spent."""
        parking = self._parking
        self._exports.drop_or_recompute(idle)
        if not idle.tokens:
            self._close(idle)
            return True
        if parking is None or idle.is_evicting or len(idle.tokens) > parking.tokens:
            return self._evict(idle)
        while not parking.park(idle.sequence):
            if self._close_deferred():
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
        while sum(len(each.tokens) for each in self._in_pool) > self.max_tokens:
            if not self._move_out(next(self._ranking.eviction_order(self._in_pool))):
                return False
        if self._parking and rows_ahead:
            self._exports.close_spare_copy()
            return all(self._move_out(idle) for idle in list(self._in_pool))
        if self._parking or not self._by_cost:
            return True
        return all(self._stay_or_leave(idle, rows_ahead) for idle in list(self._idle))

    def park_fragments(self, excluded: Sequence | None) -> None:
        """Park a small amount of idle state, if there is room for it. State that is restored
        between the cells of a few replies is copied run by run, which is many times slower."""
        mine = [idle for idle in self._in_pool if idle.sequence is not excluded]
        if self._parking is None or sum(len(idle.tokens) for idle in mine) > MAX_FRAGMENT_TOKENS:
            return
        self._exports.close_spare_copy()
        for idle in mine:
            self._exports.drop_or_recompute(idle)
            if not idle.tokens:
                self._close(idle)
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
        self._close(idle)
        return True

    def remove(self, owner: PrefixHandle) -> None:
        """Close the sequences of a deleted conversation, so that they are not reused. Its own state
        has left the store before."""
        self._close_deferred()
        for idle in [idle for idle in self._idle if idle.owner is owner]:
            self._exports.drop_or_recompute(idle)
            self._exports.export_wanted(idle)
            self._close(idle, may_return=False)

    def replace_owner(self, owner: PrefixHandle, successor: PrefixHandle | None) -> None:
        """Give the sequences of one owner to another. Close them if there is none."""
        for idle in [idle for idle in self._idle if idle.owner is owner]:
            if successor is not None:
                idle.owner = successor
            else:
                self._close(idle)

    # -- exporting -----------------------------------------------------------------------------

    def work_in_idle_moment(self) -> bool:
        """Close a deferred sequence, export one block, or park a sequence that is not the newest.
        Returns False if there is nothing left to do."""
        for idle in self._in_pool:
            self._exports.drop_scattered(idle)  # all of them, before any is computed again
        newest_first = reversed(self._idle)  # the newest is the most likely to be resumed
        return (
            self._close_deferred()
            or any(map(self._exports.export_block, newest_first))
            or self._park_one()
        )

    def _park_one(self) -> bool:
        if self._parking is None:
            return False
        newest = next(reversed(self._idle), None)
        others = (idle for idle in self._in_pool if idle is not newest)
        idle = next(others, None)
        if idle is None:
            return False
        self._exports.drop_or_recompute(idle, computes=True)
        if not idle.tokens:
            self._close(idle)
            return True
        return self._parking.park(idle.sequence)

    def export_all(self) -> None:
        self._close_deferred()
        for idle in [*self._in_pool, *self._idle]:
            for exported in list(self._in_pool):
                if self._exports.can_leave(idle):
                    break
                self._close(exported)  # to free its cells for a copy
            if idle in self._idle:
                self._exports.export_all_of(idle)

    def export(self, handle: PrefixHandle, then: Callable[[], None]) -> None:
        """Export the idle state of one conversation, then call back."""
        mine = [idle for idle in self._idle if idle.namespace == handle.namespace]
        common = [idle.tokens.common_prefix(handle.tokens) for idle in mine]
        longest = max(common, default=0)
        if longest > (handle.block.stop if handle.block else 0):
            self._flushes.append((mine[common.index(longest)], longest, then))
            self.continue_flushes()
        else:
            then()

    def continue_flushes(self) -> bool:
        """Continue exports that somebody waits for, in the order of the requests. A sequence that
        has left counts as exported. Returns False if the budget is spent."""
        while self._flushes:
            idle, tokens, then = self._flushes[0]
            if idle not in self._idle or self._exports.export(idle, tokens):
                self._flushes.popleft()
                then()
                continue
            if self._exports.budget.is_spent:
                return False
            wanted = len(idle.tokens), len(self), idle.sequence  # a copy of it does not fit
            if not self.could_make_room(*wanted) or not self.make_room(*wanted):
                return False
        return True


RowsByType = Counter[KvType]


class IdlePools:
    """The idle pool of every KV type that is in use."""

    def __init__(self, default: KvType, build: Callable[[KvType], IdlePool]) -> None:
        self._build = build
        self.default = build(default)
        self.by_type: dict[KvType, IdlePool] = {default: self.default}

    def __len__(self) -> int:
        return sum(map(len, self.by_type.values()))

    def __iter__(self) -> Iterator[IdleSequence]:
        return chain(*self.by_type.values())

    def of(self, kv_type: KvType) -> IdlePool:
        if kv_type not in self.by_type:
            self.by_type[kv_type] = self._build(kv_type)
        return self.by_type[kv_type]

    def clear(self) -> None:
        for pool in self.by_type.values():
            pool.clear()

    def count_rows(self, rows: RowsByType) -> None:
        for kv_type, pool in self.by_type.items():
            pool.count_rows(rows[kv_type])
