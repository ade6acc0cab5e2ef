"""The finished sequences of one pool: which there are, and how they are gone on from and closed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from rekindle.engine.base import Engine, Sequence
from rekindle.kvcache.block import chain_key
from rekindle.kvcache.eviction.policy import Evictor
from rekindle.runtime.device.offload import IdleExports, IdleSequence

# ----------------------------------------------------------------------
# Which idle sequence leaves the engine's memory first: by the store's policy, and fairly.


class _Part(NamedTuple):
    """A block of a sequence, or what is left of it after the last whole one."""

    key: bytes
    tokens: int


class IdleRanking:
    """Sequences are ranked by their blocks, which the policy counts as those of any tier: so a
    conversation that goes on or comes back is known. A sequence is worth what the middle one of the
    blocks is that no other has: its end is new after every turn, its beginning many have.

    Pins keep state in the store, not here: as in any tier, what is surely below may go.
    """

    def __init__(self, evictor: Evictor, block_tokens: int) -> None:
        self._evictor = evictor  # in tokens
        self._block_tokens = block_tokens
        self._parts: dict[IdleSequence, list[_Part]] = {}
        self._users: Counter[bytes] = Counter()  # sequences that a block is part of

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

    def in_order(self, candidates: Iterable[IdleSequence]) -> Iterator[IdleSequence]:
        """Those that are to leave first first: what has begun to leave, then by the policy."""
        left = list(candidates)
        while left:
            marks = {self._mark(idle): idle for idle in reversed(left)}
            leaving = next((idle for idle in left if idle.is_leaving), None)
            key = None if leaving else self._evictor.next_victim(_AllBut(marks.keys()))
            idle = leaving or (left[0] if key is None else marks[key])
            left.remove(idle)
            yield idle

    def _mark(self, idle: IdleSequence) -> bytes:
        """The block that a sequence is ranked by."""
        keys = [key for key, _ in self._parts[idle]]
        own = [key for key in keys if self._users[key] == 1] or keys[-1:]
        return own[len(own) // 2]


class _AllBut:
    def __init__(self, keys: Iterable[bytes]) -> None:
        self._keys = frozenset(keys)

    def __contains__(self, key: object) -> bool:
        return key not in self._keys


# ----------------------------------------------------------------------
# Parked sequences that a turn has gone on from elsewhere, until they are closed.


class Superseded:
    """Freeing a device's memory takes milliseconds, for which no first token need wait: they are
    closed in an idle moment, or when somebody wants their place."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def add(self, sequence: Sequence) -> None:
        self._sequences.append(sequence)

    def close(self) -> bool:
        """Close all of them; False: there were none."""
        sequences, self._sequences = self._sequences, []
        for sequence in sequences:
            self._engine.sequences.close(sequence)
        return bool(sequences)

    def clear(self) -> None:
        """The engine has lost them."""
        self._sequences.clear()


class IdleSequences:
    """Least recently used first; each is ranked as long as it is here."""

    def __init__(self, engine: Engine, exports: IdleExports, ranking: IdleRanking) -> None:
        self.superseded = Superseded(engine)
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
        """Those that hold cells."""
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
        """Whether a sequence that shares so many tokens takes the place of its source: that lives
        on in the new one if it was shared to its end, and by the same tenant."""
        return any(
            idle.sequence is source
            and shared_tokens >= len(idle.tokens)
            and idle.namespace == namespace
            for idle in self._items
        )

    def supersede(self, source: Sequence, shared_tokens: int, namespace: bytes) -> bool:
        """A turn is about to go on from a source. True: in the source itself, which has no other
        use and is the turn's from now on: marking its cells for another sequence and unmarking them
        for this one takes milliseconds. One that is parked has to be copied."""
        is_over = self.supersedes(source, shared_tokens, namespace)
        for idle in self._items:
            if idle.sequence is source:
                self._items.remove(idle)
                if not is_over:
                    idle.is_leaving = False
                    self._items.append(idle)
                    return False
                self._ranking.remove(idle)
                self._exports.close_copy(idle)
                if source.is_parked:
                    self.superseded.add(source)
                return not source.is_parked
        return False

    def clear(self) -> None:
        """The engine has lost them."""
        self._items.clear()
        self.superseded.clear()
        self._ranking.clear()
        self._exports.copied = None

    def count_rows(self, rows: int) -> None:
        """Other turns have computed so many rows beside these sequences."""
        for idle in self._items:
            idle.rows_meanwhile += rows
