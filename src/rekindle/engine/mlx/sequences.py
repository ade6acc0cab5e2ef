"""Manages the sequences of MLX models and their share of the KV budget.

MLX has no pool of cells. Each sequence has its own arrays, and cells are the KV budget counted in
tokens. Two sequences refer to the same arrays until one of them writes. Then each has its own copy,
so every sequence counts in full from the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from rekindle.engine.base import Blob, KvType, Sequence
from rekindle.engine.cells import Cells
from rekindle.engine.mlx import state
from rekindle.engine.mlx.layouts import Layouts
from rekindle.errors import CorruptBlock, EngineBroken, NoMemory, PoolFull
from rekindle.memory import plain_memory

Caches = list[Any]  # mlx_lm's cache of each layer, of one sequence


class RowBatch(Protocol):
    """The batch that a sequence is a row of."""

    def extract(self, sequence: MlxSequence, /) -> Caches: ...

    def discard(self, sequence: MlxSequence, /) -> None: ...


class BatchGroup(Protocol):
    """The batches in which the sequences of one KV type decode."""

    def shrink(self) -> None: ...

    def clear(self) -> None: ...


class MlxSequence(Sequence):
    """A sequence whose state is in its own caches, in a row of a batch, or in both between two
    steps."""

    __slots__ = ("batch", "caches")

    def __init__(self, slot: int, *, exact: bool, kv_type: KvType, caches: Caches) -> None:
        super().__init__(slot, exact=exact, kv_type=kv_type)
        self.caches: Caches | None = caches  # None: only the batch has the current state
        self.batch: RowBatch | None = None

    def read(self) -> Caches:
        """Return the current state, for reading."""
        if self.caches is None:
            assert self.batch is not None
            self.caches = self.batch.extract(self)
        return self.caches

    def take(self) -> Caches:
        """Return the current state, for writing. It leaves its batch."""
        caches = self.read()
        self.leave_batch()
        return caches

    def leave_batch(self) -> None:
        if self.batch is not None:
            self.batch.discard(self)
            self.batch = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSize:
    """Cells of all sequences of one KV type, and memory of one sequence of full length."""

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


class MlxSequences:
    """Implements `engine.base.Sequences`: every open sequence, and the cells of the shared ones."""

    parking = None  # idle caches do not slow down steps

    def __init__(
        self,
        layouts: Layouts,
        sizes: Mapping[KvType, PoolSize],
        default_type: KvType,
        batches: Mapping[KvType, BatchGroup],
        *,
        shared: int,
        exact: int,
        free_bytes: Callable[[], int],
    ) -> None:
        self._layouts = layouts
        self._sizes = sizes
        self._default_type = default_type
        self._batches = batches
        self._max_shared = shared
        self._max_exact = exact
        self._free_bytes = free_bytes
        self._pools = self._empty_pools()
        self._exact: dict[int, MlxSequence] = {}
        self.allocate = plain_memory

    def _empty_pools(self) -> dict[KvType, _Pool]:
        return {name: _Pool(size, self._max_shared) for name, size in self._sizes.items()}

    def cells(self, kv_type: KvType) -> Cells:
        return self._pools[kv_type].cells

    def free_tokens(self, kv_type: KvType | None = None) -> int:
        return self.cells(kv_type or self._default_type).free

    def freed_tokens(self, sequences: Seq[Sequence]) -> int:
        if not sequences:
            return 0
        cells = self.cells(sequences[0].kv_type)
        return cells.freed(sequence.slot for sequence in sequences)

    def open(self, *, exact: bool, kv_type: KvType | None = None) -> MlxSequence:
        kv_type = kv_type or self._default_type
        slot = self._exact_slot(kv_type) if exact else self._shared_slot(kv_type)
        caches = self._layouts.make_caches(kv_type)
        sequence = MlxSequence(slot, exact=exact, kv_type=kv_type, caches=caches)
        (self._exact if exact else self._pools[kv_type].open)[slot] = sequence
        return sequence

    def _exact_slot(self, kv_type: KvType) -> int:
        if len(self._exact) > self._max_exact:  # one more may be the target of a requantisation
            raise PoolFull("all exact sequences are open")
        needed_bytes = self._sizes[kv_type].context_bytes
        if self._free_bytes() < needed_bytes:
            raise NoMemory.for_exact_context(needed_bytes)
        return next(n for n in range(len(self._exact) + 1) if n not in self._exact)

    def _shared_slot(self, kv_type: KvType) -> int:
        """Only the default type has memory reserved. Another type needs memory that is free."""
        pool = self._pools[kv_type]
        if kv_type != self._default_type and not pool.open:
            needed_bytes = pool.size.context_bytes
            if self._free_bytes() < needed_bytes:
                raise NoMemory.for_kv_type(needed_bytes)
        return pool.take_slot()

    def share(self, source: Sequence, tokens: int, into: Sequence) -> None:
        if into.length or source.exact or into.exact or source.kv_type != into.kv_type:
            raise ValueError("sharing needs two shared sequences of one KV type, one empty")
        if tokens != source.length and not self._layouts.can_truncate:
            raise ValueError("this model's state can only be shared whole")
        if tokens:
            _ours(into).caches = state.share(_ours(source).read(), tokens)
        self.grow(into, tokens)

    def truncate(self, sequence: Sequence, tokens: int) -> None:
        if tokens >= sequence.length:
            return
        if tokens and not self._layouts.can_truncate:
            raise ValueError("this model's state cannot be truncated")
        state.truncate(_ours(sequence).take(), tokens)
        if not sequence.exact:
            self.cells(sequence.kv_type).truncate(sequence.slot, tokens)
        sequence.length = tokens

    def export(
        self, sequence: Sequence, start: int, stop: int, *, resumable: bool = False
    ) -> bytes:
        if resumable and stop != sequence.length:
            raise ValueError("a checkpoint exists only at the end of a sequence")
        layout = self._layouts[sequence.kv_type]
        with self.reset_when_broken():
            return layout.export_block(_ours(sequence).read(), start, stop, resumable=resumable)

    def restore(self, into: Sequence, blob: Blob, tokens: int, *, resumable: bool = False) -> None:
        if not into.exact and self.free_tokens(into.kv_type) < tokens:
            raise PoolFull("no free cells for this block")
        layout, stop = self._layouts[into.kv_type], into.length + tokens
        caches = _ours(into).take()
        with self.reset_when_broken():
            layout.restore_block(caches, blob, into.length, stop, resumable=resumable)
        self.grow(into, tokens)

    def requantise(
        self, blob: Blob, tokens: int, source: KvType, target: KvType, *, resumable: bool = False
    ) -> bytes:
        return self._layouts.requantise(blob, tokens, source, target, resumable=resumable)

    def grow(self, sequence: Sequence, tokens: int) -> None:
        """Count tokens that were added to a sequence."""
        if not sequence.exact:
            self.cells(sequence.kv_type).append(sequence.slot, tokens)
        sequence.length += tokens

    def close(self, sequence: Sequence) -> None:
        sequence = _ours(sequence)
        sequence.leave_batch()
        sequence.caches = None
        if sequence.exact:
            del self._exact[sequence.slot]
        else:
            self._pools[sequence.kv_type].close(sequence)
        sequence.length = 0

    def release_idle(self) -> None:
        """Drop the padding and the rows of sequences that have left their batch."""
        for batches in self._batches.values():
            batches.shrink()
        mx.clear_cache()

    def reset(self) -> None:
        """Sequences that somebody still refers to lose their state, so no memory stays in use."""
        shared = [each for pool in self._pools.values() for each in pool.open.values()]
        for sequence in (*shared, *self._exact.values()):
            sequence.caches = sequence.batch = None
        self._exact.clear()
        self._pools = self._empty_pools()
        for batches in self._batches.values():
            batches.clear()
        mx.clear_cache()

    @contextmanager
    def reset_when_broken(self) -> Iterator[None]:
        """mlx_lm changes caches before anything is computed, so they are undefined after a
        failure."""
        try:
            yield
        except CorruptBlock:  # raised before anything is changed
            raise
        except Exception as error:
            self.reset()
            raise EngineBroken(f"MLX could not compute: {error}") from error


def _ours(sequence: Sequence) -> MlxSequence:
    assert isinstance(sequence, MlxSequence)
    return sequence
