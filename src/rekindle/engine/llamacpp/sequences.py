"""Manages sequences in native memory: shared ones in pools, exact ones in separate contexts."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from functools import partial

from rekindle.engine.base import Blob, EngineOptions, KvType, Sequence, Work
from rekindle.engine.llamacpp.context import Context
from rekindle.engine.llamacpp.model import LlamaModel
from rekindle.engine.llamacpp.parking import DeviceParking
from rekindle.engine.llamacpp.pools import ExactContexts, Pools
from rekindle.engine.llamacpp.sizes import Sizes, free_bytes, measure_layout
from rekindle.engine.llamacpp.state import BlockLayouts
from rekindle.errors import EngineBroken, PoolFull
from rekindle.memory import Allocate


class LlamaSequences:
    """Implements `engine.base.Sequences`."""

    def __init__(
        self, model: LlamaModel, options: EngineOptions, sizes: Sizes, allocate: Allocate
    ) -> None:
        """Build the native memory with these sizes."""
        library, native, free = model.library, model.native, partial(free_bytes, model)
        self.pools = Pools(library, native, sizes.pool, sizes.other_pools, free)
        self.exact = ExactContexts(library, native, sizes.exact, free)
        measure = partial(measure_layout, model, options)
        self.layouts = BlockLayouts(library, sizes.layouts, options.kv_type, measure)
        self.requantise = self.layouts.requantise
        self.allocate = allocate
        self._kv_type = options.kv_type
        self._can_truncate = model.can_truncate
        self.parking: DeviceParking | None = None
        if sizes.park_tokens:
            self.parking = DeviceParking(
                self.pools.default,
                sizes.park_tokens,
                sizes.layouts[options.kv_type].each,
                partial(free_bytes, model, spread_evenly=True),
                self.reset_when_broken,
            )

    def free_tokens(self, kv_type: KvType | None = None) -> int:
        return self.pools.free_tokens(kv_type or self._kv_type)

    def freed_tokens(self, sequences: Seq[Sequence]) -> int:
        if not sequences:
            return 0
        cells = self.pools[sequences[0].kv_type].cells
        return cells.freed(sequence.slot for sequence in sequences)

    def open(self, *, exact: bool, kv_type: KvType | None = None) -> Sequence:
        kv_type = kv_type or self._kv_type
        slot = self.exact.open(kv_type) if exact else self.pools.open(kv_type)
        return Sequence(slot, exact=exact, kv_type=kv_type)

    def close(self, sequence: Sequence) -> None:
        if sequence.is_parked and self.parking:
            self.parking.drop(sequence)
        if sequence.exact:
            self.exact.close(sequence.slot)
        else:
            self.pools[sequence.kv_type].close_slot(sequence.slot)
        sequence.length = 0
        sequence.scattered_from = None

    def share(self, source: Sequence, tokens: int, into: Sequence) -> None:
        if into.length or source.exact or into.exact or source.kv_type != into.kv_type:
            raise ValueError("sharing needs two shared sequences of one KV type, one empty")
        if tokens != source.length and not self._can_truncate:
            raise ValueError("this model's state can only be shared whole")
        pool = self.pools[source.kv_type]
        _check_whole(pool.context, source.slot, tokens)
        if source.is_parked and self.parking:
            self.parking.copy(source, into)
            self.truncate(into, tokens)
            return
        pool.context.share(source.slot, into.slot, tokens)
        pool.cells.share(source.slot, tokens, into.slot)
        into.length = tokens
        _scatter(into, source.scattered_from)

    def truncate(self, sequence: Sequence, tokens: int) -> None:
        if tokens >= sequence.length:
            return
        if tokens and not self._can_truncate:
            raise ValueError("this model's state cannot be truncated")
        context, slot = self.context_of(sequence)
        if not sequence.exact:
            _check_whole(context, slot, tokens)
        with self.reset_when_broken():
            context.remove(slot, tokens)
        if not sequence.exact:
            self.pools[sequence.kv_type].cells.truncate(slot, tokens)
        sequence.length = tokens
        _scatter(sequence, sequence.scattered_from)

    def export(self, sequence: Sequence, start: int, stop: int, *, resumable: bool = False) -> Blob:
        if resumable and stop != sequence.length:
            raise ValueError("a checkpoint exists only at the end of a sequence")
        context, slot = self.context_of(sequence)
        with self.reset_when_broken():
            blob = context.export(slot, start, stop, self.allocate)
            return b"".join((blob, context.checkpoint(slot))) if resumable else blob

    def restore(self, into: Sequence, blob: Blob, tokens: int, *, resumable: bool = False) -> None:
        layout = self.layouts[into.kv_type]
        cells, checkpoint = layout.split(blob, tokens, resumable=resumable)
        if not into.exact and self.pools.free_tokens(into.kv_type) < tokens:
            raise PoolFull("no free cells for this block")
        context, slot = self.context_of(into)
        stop = into.length + tokens
        with self.reset_when_broken():
            context.restore(slot, into.length, stop, cells)
            if resumable:
                context.resume(slot, checkpoint)
                if not context.reaches(slot, stop):
                    raise EngineBroken("a checkpoint belongs to another position")
        if not into.exact:
            self.pools[into.kv_type].cells.append(slot, tokens)
        into.length = stop

    def context_of(self, sequence: Sequence) -> tuple[Context, int]:
        if sequence.exact:
            return self.exact[sequence.slot], 0
        return self.pools[sequence.kv_type].context, sequence.slot

    @contextmanager
    def reset_when_broken(self) -> Iterator[None]:
        """Rebuild the native memory after EngineBroken, because it is undefined."""
        try:
            yield
        except EngineBroken:
            self.reset()
            raise

    def reset(self) -> None:
        """Forget every sequence and rebuild the native memory."""
        self.exact.close_all()  # first, to free memory for the pool
        self.pools.reset()
        if self.parking:
            self.parking.clear()

    def release_idle(self) -> None:
        self.exact.release_idle()
        self.pools.release_idle()

    def lengthen(self, work: Seq[Work], *, on_gpu: bool) -> None:
        is_mixed = on_gpu and len(work) > 1
        for item in work:
            sequence, tokens = item.sequence, len(item.tokens)
            if is_mixed and tokens == 1 and sequence.scattered_from is None:
                sequence.scattered_from = sequence.length  # rows of a step are stored side by side
            if not sequence.exact:
                self.pools[sequence.kv_type].cells.append(sequence.slot, tokens)
            sequence.length += tokens


def _scatter(sequence: Sequence, scattered_from: int | None) -> None:
    """Inherit fragmentation from another sequence, or keep it after a cut."""
    is_whole = scattered_from is None or scattered_from >= sequence.length
    sequence.scattered_from = None if is_whole else scattered_from


def _check_whole(context: Context, slot: int, tokens: int) -> None:
    """Refuse a cut inside an image whose tokens share a position. It would copy cells, which other
    sequences may share."""
    if context.positions[slot].whole(tokens) != tokens:
        raise ValueError("a shared sequence cannot be cut inside an image of this model")
