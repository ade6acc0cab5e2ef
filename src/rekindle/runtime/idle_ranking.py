"""Which idle sequence leaves the engine's memory first: by the store's policy, and fairly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from rekindle.kvcache.block import chain_key
from rekindle.kvcache.policy import Shares
from rekindle.runtime.offload import IdleSequence


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

    def __init__(self, shares: Shares, block_tokens: int) -> None:
        self._shares = shares  # in tokens
        self._block_tokens = block_tokens
        self._parts: dict[IdleSequence, list[_Part]] = {}
        self._users: Counter[bytes] = Counter()  # sequences that a block is part of

    def add(self, idle: IdleSequence) -> None:
        parts = self._parts[idle] = list(self._cut(idle))
        for key, tokens in parts:
            if self._users[key]:
                self._shares.use(idle.tenant, key)
            else:
                self._shares.enter(idle.tenant, key, None, tokens)
            self._users[key] += 1

    def _cut(self, idle: IdleSequence) -> Iterator[_Part]:
        key = idle.tenant + idle.namespace
        for start in range(0, len(idle.tokens), self._block_tokens):
            tokens = idle.tokens[start : start + self._block_tokens]
            key = chain_key(key, tokens)
            yield _Part(key, len(tokens))

    def remove(self, idle: IdleSequence, *, may_return: bool = True) -> None:
        leave = self._shares.evict if may_return else self._shares.leave
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
            key = None if leaving else self._shares.lowest(_AllBut(marks.keys()))
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
