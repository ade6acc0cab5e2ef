"""Sequences of MLX models: where their state is, and how much of the KV budget they hold.

MLX has no pool of cells: a sequence's state is arrays of its own, as long as it is, and cells are
what the budget comes to in tokens. Two sequences refer to the same arrays until one of them is
written to, and then each has its own; so each counts for itself from the beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rekindle.engine.base import KvType, Sequence
from rekindle.engine.cells import Cells
from rekindle.errors import NoMemory, PoolFull

Caches = list[Any]  # mlx_lm's cache of each layer, of one sequence


class Batch(Protocol):
    """What a sequence knows of the batch that it is a row of."""

    def extract(self, sequence: MlxSequence, /) -> Caches: ...

    def discard(self, sequence: MlxSequence, /) -> None: ...


class MlxSequence(Sequence):
    """A sequence's state is in caches of its own, in a row of a batch, or, between two steps, in
    both."""

    __slots__ = ("batch", "caches")

    def __init__(self, slot: int, *, exact: bool, kv_type: KvType, caches: Caches) -> None:
        super().__init__(slot, exact=exact, kv_type=kv_type)
        self.caches: Caches | None = caches  # None: the batch has what is newer
        self.batch: Batch | None = None

    def read(self) -> Caches:
        """The state as it is now, not to be written to."""
        if self.caches is None:
            assert self.batch is not None
            self.caches = self.batch.extract(self)
        return self.caches

    def take(self) -> Caches:
        """The state to be written to: it is in no batch any more."""
        caches = self.read()
        self.leave_batch()
        return caches

    def leave_batch(self) -> None:
        if self.batch is not None:
            self.batch.discard(self)
            self.batch = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSize:
    """What sequences of one KV type may hold together, and what one of full length takes."""

    cells: int
    context_bytes: int


class _Pool:
    """Shared sequences of one KV type."""

    def __init__(self, size: PoolSize, sequences: int) -> None:
        self.size = size
        self.cells = Cells(size.cells)
        self.open: dict[int, MlxSequence] = {}
        self._slots = list(reversed(range(sequences)))

    def take_slot(self) -> int:
        if not self._slots:
            raise PoolFull("all sequences are open")
        return self._slots.pop()

    def close(self, sequence: MlxSequence) -> None:
        del self.open[sequence.slot]
        self.cells.close(sequence.slot)
        self._slots.append(sequence.slot)


class Sequences:
    """Every open sequence; how many there may be, and the cells of the shared ones."""

    def __init__(
        self,
        sizes: Mapping[KvType, PoolSize],
        usual: KvType,
        *,
        shared: int,
        exact: int,
        free_bytes: Callable[[], int],
    ) -> None:
        self._sizes = sizes
        self._usual = usual
        self._most_shared = shared
        self._most_exact = exact
        self._free_bytes = free_bytes
        self._pools = self._empty_pools()
        self._exact: dict[int, MlxSequence] = {}

    def _empty_pools(self) -> dict[KvType, _Pool]:
        return {name: _Pool(size, self._most_shared) for name, size in self._sizes.items()}

    def cells(self, kv_type: KvType) -> Cells:
        return self._pools[kv_type].cells

    def open(self, *, exact: bool, kv_type: KvType, caches: Caches) -> MlxSequence:
        """Raises PoolFull when too many are open, NoMemory when this one could not grow."""
        slot = self._exact_slot(kv_type) if exact else self._shared_slot(kv_type)
        sequence = MlxSequence(slot, exact=exact, kv_type=kv_type, caches=caches)
        (self._exact if exact else self._pools[kv_type].open)[slot] = sequence
        return sequence

    def _exact_slot(self, kv_type: KvType) -> int:
        if len(self._exact) > self._most_exact:  # one more, to be given what another one holds
            raise PoolFull("all exact sequences are open")
        needed_bytes = self._sizes[kv_type].context_bytes
        if self._free_bytes() < needed_bytes:
            raise NoMemory.for_exact_context(needed_bytes)
        return next(n for n in range(len(self._exact) + 1) if n not in self._exact)

    def _shared_slot(self, kv_type: KvType) -> int:
        """The budget has the usual type's cells; those of another have what is left of memory."""
        pool = self._pools[kv_type]
        if kv_type != self._usual and not pool.open:
            needed_bytes = pool.size.context_bytes
            if self._free_bytes() < needed_bytes:
                raise NoMemory.for_kv_type(needed_bytes)
        return pool.take_slot()

    def grow(self, sequence: Sequence, tokens: int) -> None:
        if not sequence.exact:
            self.cells(sequence.kv_type).append(sequence.slot, tokens)
        sequence.length += tokens

    def truncate(self, sequence: Sequence, tokens: int) -> None:
        if not sequence.exact:
            self.cells(sequence.kv_type).truncate(sequence.slot, tokens)
        sequence.length = tokens

    def close(self, sequence: MlxSequence) -> None:
        sequence.leave_batch()
        sequence.caches = None
        if sequence.exact:
            del self._exact[sequence.slot]
        else:
            self._pools[sequence.kv_type].close(sequence)
        sequence.length = 0

    def clear(self) -> None:
        """Forget all of them; whoever still has a handle keeps no memory with it."""
        shared = [each for pool in self._pools.values() for each in pool.open.values()]
        for sequence in (*shared, *self._exact.values()):
            sequence.caches = sequence.batch = None
        self._exact.clear()
        self._pools = self._empty_pools()
