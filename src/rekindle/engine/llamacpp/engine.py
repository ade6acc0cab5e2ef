"""GGUF models through llama.cpp.

Shared sequences of one KV type live in one context, a pool: they share cells and are batched
together. An exact sequence has a context of its own: its cells lie in position order and its steps
have no company, so what it computes depends on its own tokens alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from rekindle.engine.base import (
    Blob,
    Capabilities,
    EngineOptions,
    GoOn,
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
from rekindle.engine.llamacpp.capabilities import describe
from rekindle.engine.llamacpp.context import Context
from rekindle.engine.llamacpp.host_arena import lock_memory
from rekindle.engine.llamacpp.model import LlamaModel
from rekindle.engine.llamacpp.sequences import Sequences
from rekindle.engine.llamacpp.sizes import (
    choose_sizes,
)
from rekindle.engine.llamacpp.vision import Projector
from rekindle.engine.sampling.sampler import build_sampler
from rekindle.engine.sampling.step import build_step_sampler
from rekindle.errors import EngineBroken, ModelError, PoolFull, ProjectorError, Unsupported
from rekindle.memory import plain_memory
from rekindle.protocol.media import Picture
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
        self._projector = _load_projector(self._model, options)
        sizes = choose_sizes(self._model, options, self._projector)
        self.allocate = arena.allocate if arena else plain_memory
        self._sequences = Sequences.build(self._model, options, sizes, self.allocate)
        self._pools, self._exact = self._sequences.pools, self._sequences.exact
        self._layouts, self.parking = self._sequences.layouts, self._sequences.parking
        self.meanwhile = nothing_meanwhile
        self.tokenizer = self._model.tokenizer
        self.chat_template = self._model.chat_template
        self.capabilities = describe(options, self._model, sizes, self._projector)
        busy_cores = 0 if self._model.on_gpu else options.threads
        self._step_sampler = build_step_sampler(busy_cores)
        if arena:
            arena.wait_until_locked()
        #: Called with the raw logits behind every choice; how tests compare runs bit by bit.
        self.observe: Callable[[Sequence, np.ndarray[Any, Any]], None] | None = None

    # -- sequences -----------------------------------------------------------------------------

    def free_tokens(self, kv_type: KvType | None = None) -> int:
        return self._sequences.free_tokens(kv_type)

    def freed_tokens(self, sequences: Seq[Sequence]) -> int:
        return self._sequences.freed_tokens(sequences)

    def open(self, *, exact: bool, kv_type: KvType | None = None) -> Sequence:
        return self._sequences.open(exact=exact, kv_type=kv_type)

    def close_sequence(self, sequence: Sequence) -> None:
        self._sequences.close(sequence)

    def share(self, source: Sequence, tokens: int, into: Sequence) -> None:
        self._sequences.share(source, tokens, into)

    def truncate(self, sequence: Sequence, tokens: int) -> None:
        self._sequences.truncate(sequence, tokens)

    def export(self, sequence: Sequence, start: int, stop: int, *, resumable: bool = False) -> Blob:
        return self._sequences.export(sequence, start, stop, resumable=resumable)

    def restore(self, into: Sequence, blob: Blob, tokens: int, *, resumable: bool = False) -> None:
        self._sequences.restore(into, blob, tokens, resumable=resumable)

    def transcode(
        self, blob: Blob, tokens: int, source: KvType, target: KvType, *, resumable: bool = False
    ) -> bytes:
        return self._layouts.transcode(blob, tokens, source, target, resumable=resumable)

    def reset(self) -> None:
        self._sequences.reset()

    def release_idle(self) -> None:
        self._sequences.release_idle()

    # -- computing -----------------------------------------------------------------------------

    def sampler(
        self, sampling: SamplingParams, prompt: Seq[int], token_mask: TokenMask | None = None
    ) -> Sampler:
        return build_sampler(sampling, prompt, token_mask)

    def step(self, work: Seq[Work], go_on: GoOn | None = None) -> list[Sampled | None]:
        shared: dict[KvType, list[Work]] = {}
        for item in work:
            if not item.sequence.exact:
                shared.setdefault(item.sequence.kv_type, []).append(item)
        self._check_room(shared)
        calls = [
            (self._pools[kv_type].context, group)
            for kv_type, items in shared.items()
            for group in _native_calls(items, self.capabilities)
        ]
        if len(calls) == 1 and len(calls[0][1]) == len(work):  # nearly always
            first = self._step_in(*calls[0], is_first=True)
            return self._run_on(*calls[0], first, go_on) if go_on else first
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

    def _step_in(
        self, context: Context, work: Seq[Work], *, is_first: bool = False
    ) -> list[Sampled | None]:
        rows = []
        for item in work:
            sequence, vectors = item.sequence, item.vectors
            if vectors is not None and vectors.shape != self._vision.shape(item.tokens):
                raise ValueError("these are not the vectors of this picture")
            slot = 0 if sequence.exact else sequence.slot
            has_sampler = item.sampler is not None
            rows.append(Rows(slot, sequence.length, item.tokens, has_sampler, vectors))
        sees_ahead = self.capabilities.whole_pictures and work[0].vectors is not None
        try:
            last = context.decode(rows, causal=not sees_ahead)
        except EngineBroken:
            self.reset()
            raise
        if is_first:
            self.meanwhile()  # a GPU computes until its logits are read
        samplers = [item.sampler for item in work if item.sampler is not None]
        wanted = [row for row, item in zip(last, work, strict=True) if item.sampler is not None]
        chosen = iter(self._finish(context, work, samplers, wanted))
        return [None if item.sampler is None else next(chosen) for item in work]

    def _run_on(
        self, context: Context, work: Seq[Work], results: list[Sampled | None], go_on: GoOn
    ) -> list[Sampled | None]:
        """Further steps of the same replies. What is the same in each of them is not done again:
        beside the native call of a small model, that is most of the time."""
        cells = self._pools[work[0].sequence.kv_type].cells
        samplers = [item.sampler for item in work if item.sampler is not None]
        last = range(len(work))
        while cells.free >= len(work) and go_on(results):
            try:
                context.decode_next([sampled.token for sampled in results if sampled])
            except EngineBroken:
                self.reset()
                raise
            self.meanwhile()
            results = [*self._finish(context, work, samplers, last)]
        return results

    def _finish(
        self, context: Context, work: Seq[Work], samplers: Seq[Sampler], wanted: Seq[int]
    ) -> list[Sampled]:
        """What is being computed becomes part of the sequences; the next token of each piece of
        work that has a sampler, from these rows."""
        if self._model.on_gpu:
            self._step_sampler.arm(samplers, self.tokenizer.size)
        self._sequences.lengthen(work, on_gpu=self._model.on_gpu)
        if not samplers:
            return []
        logits = context.logits(wanted, self.tokenizer.size)
        if self.observe is not None:
            sampling = [item for item in work if item.sampler is not None]
            for item, row in zip(sampling, logits, strict=True):
                self.observe(item.sequence, row)
        return self._step_sampler.sample(samplers, logits)

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


def _native_calls(work: Seq[Work], capabilities: Capabilities) -> list[Seq[Work]]:
    """Text and pictures are computed in calls of their own."""
    pictures = [item for item in work if item.vectors is not None]
    if not pictures:
        return [work]
    text = [item for item in work if item.vectors is None]
    groups: list[Seq[Work]] = [text] if text else []
    if capabilities.whole_pictures:
        return [*groups, *([item] for item in pictures)]
    return [*groups, pictures]


def _load_projector(model: LlamaModel, options: EngineOptions) -> Projector | None:
    if options.mmproj is None:
        return None
    try:
        return Projector(model, options, options.mmproj)
    except ProjectorError:
        model.close()  # the caller may load it again, without
        raise
