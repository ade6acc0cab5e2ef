"""Keeps the finished sequences of one KV pool and ranks them for eviction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from rekindle.engine.base import Engine, Sequence
from rekindle.kvcache.block import chain_key
from rekindle.kvcache.eviction.policy import Evictor
from rekindle.runtime.device.offload import IdleSequence, OffloadQueue


class _Part(NamedTuple):
    """A block of a sequence. The last one may be short."""

    key: bytes
    tokens: int


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
        self._parts: dict[IdleSequence, list[_Part]] = {}
        self._users: Counter[bytes] = Counter()  # number of sequences that have a block

    def add(self, idle: IdleSequence) -> None:
        parts = self._parts[idle] = list(self._cut(idle))
        for key, tokens in parts:
            if self._users[key]:
                self._evictor.use(idle.tenant, key)
            else:
                self._evictor.add(idle.tenant, key, None, tokens)
            self._users[key] += 1

    def _cut(self, idle: IdleSequence) -> Iterator[_Part]:
        key = idle.tenant + idle.namespace
        for start in range(0, len(idle.tokens), self._block_tokens):
            tokens = idle.tokens[start : start + self._block_tokens]
            key = chain_key(key, tokens)
            yield _Part(key, len(tokens))

    def remove(self, idle: IdleSequence, *, may_return: bool = True) -> None:
        leave = self._evictor.evict if may_return else self._evictor.remove
        for part in reversed(self._parts.pop(idle)):
            self._users[part.key] -= 1
            if not self._users[part.key]:
                del self._users[part.key]
                leave(idle.tenant, part.key, part.tokens)

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


class DeferredFrees:
    """Parked sequences that a turn has resumed in the pool and that nobody needs any more.

    Freeing device memory takes milliseconds. To keep them out of the time to first token, these
    sequences are closed in an idle moment or when their memory is needed.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def add(self, sequence: Sequence) -> None:
        self._sequences.append(sequence)

    def close(self) -> bool:
        """Close all of them. Returns False if there were none."""
        sequences, self._sequences = self._sequences, []
        for sequence in sequences:
            self._engine.sequences.close(sequence)
        return bool(sequences)

    def clear(self) -> None:
        """Drop all handles after the engine has lost its sequences."""
        self._sequences.clear()


class IdleSequences:
    """The idle sequences of one pool in LRU order. Each is ranked while it is here."""

    def __init__(self, engine: Engine, exports: OffloadQueue, ranking: IdleRanking) -> None:
        self.deferred = DeferredFrees(engine)
        self._engine = engine
        self._exports = exports
        self._ranking = ranking
        self._items: list[IdleSequence] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[IdleSequence]:
        return iter(self._items)

    def __reversed__(self) -> Iterator[IdleSequence]:
        return reversed(self._items)

    def __contains__(self, idle: object) -> bool:
        return idle in self._items

    @property
    def in_pool(self) -> Iterator[IdleSequence]:
        """Sequences that are not parked, so they hold cells of the pool."""
        return (idle for idle in self._items if not idle.sequence.is_parked)

    def add(self, idle: IdleSequence) -> None:
        self._items.append(idle)
        self._ranking.add(idle)

    def close(self, idle: IdleSequence, *, may_return: bool = True) -> None:
        self._exports.close_copy(idle)
        self._items.remove(idle)
        self._ranking.remove(idle, may_return=may_return)
        self._engine.sequences.close(idle.sequence)

    def supersedes(self, source: Sequence, shared_tokens: int, namespace: bytes) -> bool:
        """Whether a turn that shares this prefix makes its source useless. It does if it shares all
        of the source, and belongs to the same tenant."""
        return any(
            idle.sequence is source
            and shared_tokens >= len(idle.tokens)
            and idle.namespace == namespace
            for idle in self._items
        )

    def supersede(self, source: Sequence, shared_tokens: int, namespace: bytes) -> bool:
        """Resume a turn from an idle sequence. Returns True if the turn takes the sequence itself.

        It takes a source that is of no other use, because tagging its cells for another sequence
        and untagging them takes milliseconds. A parked source has to be copied.
        """
        is_over = self.supersedes(source, shared_tokens, namespace)
        for idle in self._items:
            if idle.sequence is source:
                self._items.remove(idle)
                if not is_over:
                    idle.is_evicting = False
                    self._items.append(idle)
                    return False
                self._ranking.remove(idle)
                self._exports.close_copy(idle)
                if source.is_parked:
                    self.deferred.add(source)
                return not source.is_parked
        return False

    def clear(self) -> None:
        """Drop all handles after the engine has lost its sequences."""
        self._items.clear()
        self.deferred.clear()
        self._ranking.clear()
        self._exports.copied = None

    def count_rows(self, rows: int) -> None:
        """Count rows that other turns computed while these sequences were idle."""
        for idle in self._items:
            idle.rows_since_idle += rows
