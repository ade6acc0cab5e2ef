"""Idle sequences of every KV type: each type's lie in a pool of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain

from rekindle.engine.base import KvType, Sequence
from rekindle.kvcache.block import PrefixHandle
from rekindle.runtime.idle_pool import IdlePool
from rekindle.runtime.offload import IdleSequence

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
