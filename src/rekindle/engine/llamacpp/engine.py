"""GGUF models through llama.cpp.

Shared sequences of one KV type live in one context, a pool: they share cells and are batched
together. An exact sequence has a context of its own: its cells lie in position order and its steps
have no company, so what it computes depends on its own tokens alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from rekindle.buffers import plain_memory
from rekindle.engine.base import (
    Blob,
    Capabilities,
    Device,
    EngineOptions,
    KvLayout,
    KvType,
    Matrix,
    OnProgress,
    Sampled,
    Sampler,
    Sequence,
    TokenMask,
    Work,
    nothing_meanwhile,
)
from rekindle.engine.llamacpp import bindings
from rekindle.engine.llamacpp.batch import Rows
from rekindle.engine.llamacpp.context import Context
from rekindle.engine.llamacpp.exact_contexts import ExactContexts
from rekindle.engine.llamacpp.fingerprint import Numerics, state_fingerprint, weights_digest
from rekindle.engine.llamacpp.gpus import find_gpus
from rekindle.engine.llamacpp.host_arena import lock_memory
from rekindle.engine.llamacpp.layouts import BITS, Layouts
from rekindle.engine.llamacpp.model import LlamaModel
from rekindle.engine.llamacpp.parking import Parking
from rekindle.engine.llamacpp.pools import Pools
from rekindle.engine.llamacpp.sizes import (
    Sizes,
    choose_sizes,
    evenly_free_bytes,
    free_bytes,
    measure_layout,
)
from rekindle.engine.llamacpp.state import GROUPS
from rekindle.engine.llamacpp.vision import Projector
from rekindle.engine.sampling import build_sampler
from rekindle.engine.step_sampler import build_step_sampler
from rekindle.errors import EngineBroken, ModelError, PoolFull, ProjectorError, Unsupported
from rekindle.protocol.media import IMAGE, TEXT, Picture
from rekindle.protocol.requests import SamplingParams
from rekindle.tokens import Tokens


class LlamaCppEngine:
    state_files = None  # no other program reads its blocks

    def __init__(
        self, options: EngineOptions, on_progress: OnProgress = lambda _done: None
    ) -> None:
        host_bytes = 0 if options.gpu_layers == 0 else options.host_bytes
        arena = lock_memory(bindings.load_library(), host_bytes)
        self._model = LlamaModel(options, on_progress)
        if not self._model.is_causal:
            raise ModelError(
                f"{options.path.name} makes vectors and generates no text: "
                "give it as --embedding-model"
            )
        self._options = options
        self._projector = self._load_projector(options)
        sizes = choose_sizes(self._model, options, self._projector)
        library, native = self._model.library, self._model.native

        def free() -> int:
            return free_bytes(self._model)

        self._pools = Pools(library, native, sizes.pool, sizes.other_pools, free)
        self._exact = ExactContexts(library, native, sizes.exact, free)
        self.parking = self._build_parking(sizes)
        self.meanwhile = nothing_meanwhile
        self.allocate = arena.allocate if arena else plain_memory
        measure = partial(measure_layout, self._model, options)
        self._layouts = Layouts(library, sizes.layouts, options.kv_type, measure)
        self.tokenizer = self._model.tokenizer
        self.chat_template = self._model.chat_template
        self.capabilities = _capabilities(options, self._model, sizes, self._projector)
        busy_cores = 0 if self._model.on_gpu else options.threads
        self._step_sampler = build_step_sampler(busy_cores)
        if arena:
            arena.settle()
        #: Called with the raw logits behind every choice; how tests compare runs bit by bit.
        self.observe: Callable[[Sequence, np.ndarray[Any, Any]], None] | None = None

    def _build_parking(self, sizes: Sizes) -> Parking | None:
        if not sizes.park_tokens:
            return None
        return Parking(
            self._pools.usual,
            sizes.park_tokens,
            sizes.layouts[self._options.kv_type].each,
            partial(evenly_free_bytes, self._model),
            self._reset_when_broken,
        )

    def _load_projector(self, options: EngineOptions) -> Projector | None:
        if options.mmproj is None:
            return None
        try:
            return Projector(self._model, options, options.mmproj)
        except ProjectorError:
            self._model.close()  # the caller may load it again, without
            raise

    def free_tokens(self, kv_type: KvType | None = None) -> int:
        return self._pools.free_tokens(kv_type or self._options.kv_type)

    def freed_tokens(self, sequences: Seq[Sequence]) -> int:
        if not sequences:
            return 0
        cells = self._pools[sequences[0].kv_type].cells
        return cells.freed(sequence.slot for sequence in sequences)

    # -- sequences -----------------------------------------------------------------------------

    def open(self, *, exact: bool, kv_type: KvType | None = None) -> Sequence:
        kv_type = kv_type or self._options.kv_type
        slot = self._exact.open(kv_type) if exact else self._pools.open(kv_type)
        return Sequence(slot, exact=exact, kv_type=kv_type)

    def close_sequence(self, sequence: Sequence) -> None:
        if sequence.is_parked and self.parking:
            self.parking.drop(sequence)
        if sequence.exact:
            self._exact.close(sequence.slot)
        else:
            self._pools[sequence.kv_type].close_slot(sequence.slot)
        sequence.length = 0
        sequence.scattered_from = None

    def share(self, source: Sequence, tokens: int, into: Sequence) -> None:
        if into.length or source.exact or into.exact or source.kv_type != into.kv_type:
            raise ValueError("only shared sequences of one KV type share, and into an empty one")
        if tokens != source.length and not self.capabilities.can_truncate:
            raise ValueError("this model's state is shared whole or not at all")
        pool = self._pools[source.kv_type]
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
        if tokens and not self.capabilities.can_truncate:
            raise ValueError("this model's state cannot be truncated")
        context, slot = self._context_of(sequence)
        if not sequence.exact:
            _check_whole(context, slot, tokens)
        with self._reset_when_broken():
            context.remove(slot, tokens)
        if not sequence.exact:
            self._pools[sequence.kv_type].cells.truncate(slot, tokens)
        sequence.length = tokens
        _scatter(sequence, sequence.scattered_from)

    def export(self, sequence: Sequence, start: int, stop: int, *, resumable: bool = False) -> Blob:
        if resumable and stop != sequence.length:
            raise ValueError("a checkpoint is of the sequence's end")
        context, slot = self._context_of(sequence)
        with self._reset_when_broken():
            blob = context.export(slot, start, stop, self.allocate)
            return b"".join((blob, context.checkpoint(slot))) if resumable else blob

    def restore(self, into: Sequence, blob: Blob, tokens: int, *, resumable: bool = False) -> None:
        layout = self._layouts[into.kv_type]
        cells, checkpoint = layout.split(blob, tokens, resumable=resumable)
        if not into.exact and self._pools.free_tokens(into.kv_type) < tokens:
            raise PoolFull("no free cells for this block")
        context, slot = self._context_of(into)
        stop = into.length + tokens
        with self._reset_when_broken():
            context.restore(slot, into.length, stop, cells)
            if resumable:
                context.resume(slot, checkpoint)
                if not context.reaches(slot, stop):
                    raise EngineBroken("a checkpoint is of another position")
        if not into.exact:
            self._pools[into.kv_type].cells.append(slot, tokens)
        into.length = stop

    def transcode(
        self, blob: Blob, tokens: int, source: KvType, target: KvType, *, resumable: bool = False
    ) -> bytes:
        return self._layouts.transcode(blob, tokens, source, target, resumable=resumable)

    def _context_of(self, sequence: Sequence) -> tuple[Context, int]:
        """The context that a sequence lives in, and its slot there."""
        if sequence.exact:
            return self._exact[sequence.slot], 0
        return self._pools[sequence.kv_type].context, sequence.slot

    @contextmanager
    def _reset_when_broken(self) -> Iterator[None]:
        """An undefined memory is never used again: build it anew, empty."""
        try:
            yield
        except EngineBroken:
            self.reset()
            raise

    def reset(self) -> None:
        """Forget every sequence and rebuild the native memory."""
        self._exact.close_all()  # before the pool asks for memory again
        self._pools.reset()
        if self.parking:
            self.parking.clear()

    def release_idle(self) -> None:
        self._exact.release_idle()
        self._pools.release_idle()

    # -- computing -----------------------------------------------------------------------------

    def sampler(
        self, sampling: SamplingParams, prompt: Seq[int], token_mask: TokenMask | None = None
    ) -> Sampler:
        return build_sampler(sampling, prompt, token_mask)

    def step(self, work: Seq[Work]) -> list[Sampled | None]:
        shared: dict[KvType, list[Work]] = {}
        for item in work:
            if not item.sequence.exact:
                shared.setdefault(item.sequence.kv_type, []).append(item)
        self._check_room(shared)
        calls = [
            (self._pools[kv_type].context, group)
            for kv_type, items in shared.items()
            for group in self._native_calls(items)
        ]
        if len(calls) == 1 and len(calls[0][1]) == len(work):  # nearly always
            return self._step_in(*calls[0], is_first=True)
        results: dict[int, Sampled | None] = {}
        for number, (context, group) in enumerate(calls):
            try:
                sampled = self._step_in(context, group, is_first=not number)
            except PoolFull as error:
                if not number:
                    raise
                self.reset()  # some of the work is done: there is no way back
                raise EngineBroken("no room for the second part of a step") from error
            results.update(zip(map(id, group), sampled, strict=True))
        for item in work:
            if item.sequence.exact:
                results[id(item)] = self._step_in(self._exact[item.sequence.slot], [item])[0]
        return [results[id(item)] for item in work]

    def _check_room(self, shared: Mapping[KvType, Seq[Work]]) -> None:
        """Checked here: llama.cpp sees no lack of cells in a recurrent memory."""
        for kv_type, items in shared.items():
            if sum(len(item.tokens) for item in items) > self._pools.free_tokens(kv_type):
                raise PoolFull("no free cells for this step")
        if shared and self.parking:
            self.parking.compact()

    def _native_calls(self, work: Seq[Work]) -> list[Seq[Work]]:
        """Text and pictures are computed in calls of their own."""
        pictures = [item for item in work if item.vectors is not None]
        if not pictures:
            return [work]
        text = [item for item in work if item.vectors is None]
        groups: list[Seq[Work]] = [text] if text else []
        if self.capabilities.whole_pictures:
            return [*groups, *([item] for item in pictures)]
        return [*groups, pictures]

    def _step_in(
        self, context: Context, work: Seq[Work], *, is_first: bool = False
    ) -> list[Sampled | None]:
        rows = []
        for item in work:
            sequence, vectors = item.sequence, item.vectors
            if vectors is not None and vectors.shape != self._vision.shape(item.tokens):
                raise ValueError("these are not the vectors of this picture")
            slot = 0 if sequence.exact else sequence.slot
            wanted = item.sampler is not None
            rows.append(Rows(slot, sequence.length, item.tokens, wanted, vectors))
        try:
            last = context.decode(rows, causal=not self._sees_ahead(work))
        except EngineBroken:
            self.reset()
            raise
        if is_first:
            self.meanwhile()  # a GPU computes until its logits are read
        self._lengthen(work)
        return self._sample(context, work, last)

    def _lengthen(self, work: Seq[Work]) -> None:
        """What was computed is part of its sequence."""
        is_mixed = self._model.on_gpu and len(work) > 1
        for item in work:
            sequence, tokens = item.sequence, len(item.tokens)
            if is_mixed and tokens == 1 and sequence.scattered_from is None:
                sequence.scattered_from = sequence.length  # rows of a step lie side by side
            if not sequence.exact:
                self._pools[sequence.kv_type].cells.append(sequence.slot, tokens)
            sequence.length += tokens

    def _sees_ahead(self, work: Seq[Work]) -> bool:
        return self.capabilities.whole_pictures and work[0].vectors is not None

    def _sample(self, context: Context, work: Seq[Work], last: Seq[int]) -> list[Sampled | None]:
        wanted = [at for at, item in enumerate(work) if item.sampler is not None]
        results: list[Sampled | None] = [None] * len(work)
        if not wanted:
            return results
        logits = context.logits([last[at] for at in wanted], self.tokenizer.size)
        if self.observe is not None:
            for at, row in zip(wanted, logits, strict=True):
                self.observe(work[at].sequence, row)
        samplers = [item.sampler for item in work if item.sampler is not None]
        sampled = self._step_sampler.sample(samplers, logits)
        for at, each in zip(wanted, sampled, strict=True):
            results[at] = each
        return results

    def picture_tokens(self, width: int, height: int, digest: bytes) -> Tokens:
        return self._vision.tokens(width, height, digest)

    def encode_picture(self, picture: Picture) -> list[Matrix]:
        return self._vision.encode(picture)

    @property
    def _vision(self) -> Projector:
        if self._projector is None:
            raise Unsupported("This model sees no pictures: it is served without a projector.")
        return self._projector

    def close(self) -> None:
        self._step_sampler.close()
        self._pools.close()
        self._exact.close_all()
        if self._projector is not None:
            self._projector.close()
        self._model.close()


def _scatter(sequence: Sequence, scattered_from: int | None) -> None:
    """Of cells that another sequence had, or that this one had before it was cut."""
    is_whole = scattered_from is None or scattered_from >= sequence.length
    sequence.scattered_from = None if is_whole else scattered_from


def _check_whole(context: Context, slot: int, tokens: int) -> None:
    """Cutting through a picture whose tokens have one position copies cells: those of an exact
    sequence, which nobody shares."""
    if context.whole(slot, tokens) != tokens:
        raise ValueError("a shared sequence is not cut inside a picture of this model")


def _capabilities(
    options: EngineOptions, model: LlamaModel, sizes: Sizes, projector: Projector | None
) -> Capabilities:
    weights = weights_digest(options.path, options.mmproj)
    return Capabilities(
        block_tokens=sizes.block_tokens,
        step_tokens=sizes.step_tokens,
        context_tokens=sizes.context_tokens,
        batch_tokens=sizes.pool.batch,
        pool_tokens=sizes.pool.cells,
        sequences=sizes.pool.sequences,
        exact_sequences=sizes.exact.contexts,
        can_truncate=model.can_truncate,
        device="gpu" if model.on_gpu else "cpu",
        kv_type=options.kv_type,
        kv={
            kv_type: KvLayout(
                bits=BITS[kv_type],
                group_size=GROUPS[kv_type][0] if BITS[kv_type] < 16 else None,
                header_bytes=state.fixed,
                token_bytes=state.each,
                checkpoint_bytes=state.checkpoint,
                fingerprint=state_fingerprint(
                    weights, Numerics.of(model, options, sizes.step_tokens, kv_type)
                ),
            )
            for kv_type, state in sizes.layouts.items()
        },
        modalities=frozenset({TEXT, IMAGE} if projector else {TEXT}),
        whole_pictures=projector is not None and projector.is_whole,
        computes_beside=model.on_gpu,
        architecture=model.architecture,
        parameters=model.parameters,
        quantization=model.quantization,
        gpus=tuple(Device(gpu.name, gpu.total_bytes) for gpu in find_gpus(model.library)),
        layers=model.layers + 1,  # + 1: the output layer
        gpu_layers=min(model.gpu_layers(options), model.layers + 1),
    )
