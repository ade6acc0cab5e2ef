"""Describes the finished sequences of a KV pool and ranks them for eviction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rekindle.engine.base import Sequence
from rekindle.kvcache.block import PrefixHandle, WriteBack, chain_key
from rekindle.kvcache.eviction.policy import Evictor
from rekindle.runtime.schedule.turn import Offloaded
from rekindle.tokens import Tokens


@dataclass(slots=True, eq=False)
class IdleSequence:
    """A finished sequence that stays in the engine until its memory is needed."""

    sequence: Sequence
    tokens: Tokens
    namespace: bytes
    tenant: bytes
    exact_tokens: int  # the first tokens, which were computed in canonical steps
    write_back: WriteBack
    offloaded: Offloaded
    owner: PrefixHandle | None = None  # the entry that it is freed with, or a turn that waits
    restarts: int = 0  # exports begun again because blocks had left the store
    rows_since_idle: int = 0  # computed by other turns
    is_unused: bool = False  # since the last upkeep
    is_evicting: bool = False  # its export has begun, to make room
    copy: Sequence | None = None  # a parked sequence is exported from a copy in the pool
    dropped: Tokens | None = None  # all its tokens, after its scattered cells were freed


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
