"""Manages the sequences of MLX models and their share of the KV budget.

MLX has no pool of cells. Each sequence has its own arrays, and cells are the KV budget counted in
tokens. Two sequences refer to the same arrays until one of them writes. Then each has its own copy,
so every sequence counts in full from the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager

import mlx.core as mx

from rekindle.engine.base import Blob, Capabilities, KvLayout, KvType, Sequence
from rekindle.engine.cells import Cells
from rekindle.engine.mlx import state
from rekindle.engine.mlx.batches import DecodingBatches, MlxSequence
from rekindle.engine.mlx.layouts import Layouts
from rekindle.errors import CorruptBlock, EngineBroken, NoMemory, PoolFull
from rekindle.memory import plain_memory


def context_bytes(layout: KvLayout, tokens: int) -> int:
    """Return the memory of one sequence of this length."""
    return tokens * max(layout.token_bytes, 1) + layout.checkpoint_bytes


class MlxSequences:
    """Implements `engine.base.Sequences`: every open sequence, and the cells of the shared ones."""

    parking = None  # idle caches do not slow down steps

    def __init__(
        self,
        layouts: Layouts,
        capabilities: Capabilities,
        pools: Mapping[KvType, int],
        batches: Mapping[KvType, DecodingBatches],
        free_bytes: Callable[[], int],
    ) -> None:
        """`pools` has the cells of all shared sequences of each KV type."""
        self._layouts = layouts
        self._capabilities = capabilities
        self._cells = {kv_type: Cells(cells) for kv_type, cells in pools.items()}
        self._batches = batches
        self._free_bytes = free_bytes
        self._open: set[MlxSequence] = set()
        self.allocate = plain_memory
        self.requantise = layouts.requantise

    def free_tokens(self, kv_type: KvType | None = None) -> int:
        return self._cells[kv_type or self._capabilities.kv_type].free

    def freed_tokens(self, sequences: Seq[Sequence]) -> int:
        if not sequences:
            return 0
        cells = self._cells[sequences[0].kv_type]
        return cells.freed(sequence.slot for sequence in sequences)

    def open(self, *, exact: bool, kv_type: KvType | None = None) -> MlxSequence:
        known = self._capabilities
        kv_type = kv_type or known.kv_type
        of_kind = (each for each in self._open if each.exact == exact)
        taken = {each.slot for each in of_kind if exact or each.kv_type == kv_type}
        # One more exact sequence may be the target of a requantisation.
        most = known.exact_sequences + 1 if exact else known.sequences
        if len(taken) == most:
            raise PoolFull(f"all {'exact ' if exact else ''}sequences are open")
        # Only shared sequences of the default type have memory reserved.
        if exact or (kv_type != known.kv_type and not taken):
            needed_bytes = context_bytes(known.kv[kv_type], known.context_tokens)
            if self._free_bytes() < needed_bytes:
                error = NoMemory.for_exact_context if exact else NoMemory.for_kv_type
                raise error(needed_bytes)
        slot = next(n for n in range(most) if n not in taken)
        caches = self._layouts.make_caches(kv_type)
        sequence = MlxSequence(slot, exact=exact, kv_type=kv_type, caches=caches)
        self._open.add(sequence)
        return sequence

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
            self._cells[sequence.kv_type].truncate(sequence.slot, tokens)
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

    def grow(self, sequence: Sequence, tokens: int) -> None:
        """Count tokens that were added to a sequence."""
        if not sequence.exact:
            self._cells[sequence.kv_type].append(sequence.slot, tokens)
        sequence.length += tokens

    def close(self, sequence: Sequence) -> None:
        sequence = _ours(sequence)
        sequence.leave_batch()
        sequence.caches = None
        self._open.remove(sequence)
        if not sequence.exact:
            self._cells[sequence.kv_type].close(sequence.slot)
        sequence.length = 0

    def release_idle(self) -> None:
        """Drop the padding and the rows of sequences that have left their batch."""
        for batches in self._batches.values():
            batches.shrink()
        mx.clear_cache()

    def reset(self) -> None:
        """Sequences that somebody still refers to lose their state, so no memory stays in use."""
        for sequence in self._open:
            sequence.caches = sequence.batch = None
        self._open.clear()
        for cells in self._cells.values():
            cells.clear()
        for batches in self._batches.values():
            batches.clear()
        mx.clear_cache()

    @contextmanager
    def reset_when_broken(self) -> Iterator[None]:
        """Reset after a failure, because mlx_lm changes caches before it computes anything."""
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
