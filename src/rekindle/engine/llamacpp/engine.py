"""Runs GGUF models with llama.cpp.

Shared sequences of one KV type live in one context, a pool. They share cells and are batched
together. An exact sequence has its own context: its cells are in position order and its steps
contain nothing else, so the result depends only on its own tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import numpy as np

from rekindle.engine.base import (
    Capabilities,
    EngineOptions,
    KvType,
    Matrix,
    OnProgress,
    Pending,
    Sampled,
    Sequence,
    Work,
)
from rekindle.engine.llamacpp import bindings
from rekindle.engine.llamacpp.batch import BatchRows
from rekindle.engine.llamacpp.capabilities import describe
from rekindle.engine.llamacpp.context import Context
from rekindle.engine.llamacpp.host_arena import lock_memory
from rekindle.engine.llamacpp.model import LlamaModel
from rekindle.engine.llamacpp.sequences import LlamaSequences
from rekindle.engine.llamacpp.sizes import choose_sizes
from rekindle.engine.llamacpp.vision import Projector
from rekindle.engine.sampling.sampler import TokenSampler, build_step_sampler
from rekindle.errors import EngineBroken, ModelError, PoolFull, ProjectorError, Unsupported
from rekindle.memory import plain_memory
from rekindle.protocol.requests import Picture
from rekindle.tokens import Tokens


class NativeCall:
    """Work for one call of llama_decode, and which of its rows have logits."""

    __slots__ = ("context", "sampled_rows", "samplers", "sampling", "work")

    def __init__(self, context: Context, work: Seq[Work]) -> None:
        self.context = context
        self.work = work
        self.sampling = [item for item in work if item.sampler is not None]
        self.samplers = [item.sampler for item in work if item.sampler is not None]
        self.sampled_rows: Seq[int] = ()


class LlamaPending(NamedTuple):
    """A launched step. Its first native call has been made. The others follow when it is
    collected, because a context only keeps the logits of its last call."""

    work: Seq[Work]
    calls: list[NativeCall]


class LlamaCppEngine:
    """Implements `engine.base.Engine`."""

    sampler = TokenSampler
    state_files = None  # no other program reads our blocks of llama.cpp's state

    def __init__(
        self, options: EngineOptions, on_progress: OnProgress = lambda _done: None
    ) -> None:
        host_bytes = 0 if options.gpu_layers == 0 else options.host_bytes
        arena = lock_memory(bindings.load_library(), host_bytes)
        self._model = LlamaModel(options, on_progress)
        if not self._model.is_causal:
            raise ModelError(
                f"{options.path.name} computes embeddings and generates no text: "
                "give it as --embedding-model"
            )
        self._projector = _load_projector(self._model, options)
        sizes = choose_sizes(self._model, options, self._projector)
        allocate = arena.allocate if arena else plain_memory
        self.sequences = LlamaSequences(self._model, options, sizes, allocate)
        self._pools, self._exact = self.sequences.pools, self.sequences.exact
        self.tokenizer = self._model.tokenizer
        self.chat_template = self._model.chat_template
        self.capabilities = describe(options, self._model, sizes, self._projector)
        busy_cores = 0 if self._model.on_gpu else options.threads
        self._step_sampler = build_step_sampler(busy_cores)
        if arena:
            arena.wait_until_locked()
        #: Called with the raw logits of every sampled token, so that tests can compare bits.
        self.observe: Callable[[Sequence, np.ndarray[Any, Any]], None] | None = None

    def launch(self, work: Seq[Work]) -> LlamaPending:
        shared: dict[KvType, list[Work]] = {}
        for item in work:
            if not item.sequence.exact:
                shared.setdefault(item.sequence.kv_type, []).append(item)
        self._check_room(shared)
        calls = [
            NativeCall(self._pools[kv_type].context, group)
            for kv_type, items in shared.items()
            for group in _native_calls(items, self.capabilities)
        ]
        exact = (item for item in work if item.sequence.exact)
        calls += [NativeCall(self._exact[item.sequence.slot], [item]) for item in exact]
        self._decode(calls[0])
        return LlamaPending(work, calls)

    def _check_room(self, shared: Mapping[KvType, Seq[Work]]) -> None:
        """llama.cpp does not notice a lack of cells in a recurrent memory, so we check here."""
        for kv_type, items in shared.items():
            if sum(len(item.tokens) for item in items) > self._pools.free_tokens(kv_type):
                raise PoolFull("no free cells for this step")
        if shared and self.sequences.parking:
            self.sequences.parking.compact()

    def _decode(self, call: NativeCall) -> None:
        """Make the native call. A GPU is still computing when it returns."""
        rows = []
        for item in call.work:
            sequence, vectors = item.sequence, item.vectors
            if vectors is not None and vectors.shape != self._vision.shape(item.tokens):
                raise ValueError("these are not the vectors of this image")
            slot = 0 if sequence.exact else sequence.slot
            has_sampler = item.sampler is not None
            rows.append(BatchRows(slot, sequence.length, item.tokens, has_sampler, vectors))
        sees_ahead = self.capabilities.whole_pictures and call.work[0].vectors is not None
        with self.sequences.reset_when_broken():
            last_rows = call.context.decode(rows, causal=not sees_ahead)
        sampled = zip(last_rows, call.work, strict=True)
        call.sampled_rows = [row for row, item in sampled if item.sampler is not None]
        self.sequences.lengthen(call.work, on_gpu=self._model.on_gpu)

    def launch_next(self, pending: Pending, tokens: Seq[int]) -> LlamaPending:
        """Repeat the native call of the step with new tokens. Rebuilding the call would take as
        long as the native call of a small model. A step with sequences of several KV types has
        several calls and is launched anew."""
        assert isinstance(pending, LlamaPending)
        if len(pending.calls) > 1:
            items = zip(pending.work, tokens, strict=True)
            return self.launch([item._replace(tokens=[token]) for item, token in items])
        [call] = pending.calls
        if self._pools.free_tokens(call.work[0].sequence.kv_type) < len(tokens):
            raise PoolFull("no free cells for this step")
        with self.sequences.reset_when_broken():
            call.context.decode_next(tokens)
        call.sampled_rows = range(len(tokens))
        self.sequences.lengthen(call.work, on_gpu=self._model.on_gpu)
        return pending

    def collect(self, pending: Pending) -> list[Sampled | None]:
        assert isinstance(pending, LlamaPending)
        first, *others = pending.calls
        sampled = self._sample(first)
        if not others and len(sampled) == len(pending.work):
            return [*sampled]
        results = dict(zip(map(id, first.sampling), sampled, strict=True))
        for call in others:
            try:
                self._decode(call)
            except PoolFull as error:
                self.sequences.reset()  # part of the step is done and cannot be undone
                raise EngineBroken("no free cells for the second part of a step") from error
            results.update(zip(map(id, call.sampling), self._sample(call), strict=True))
        return [results.get(id(item)) for item in pending.work]

    def _sample(self, call: NativeCall) -> list[Sampled]:
        if not call.samplers:
            return []
        if self._model.on_gpu:
            self._step_sampler.arm(call.samplers, self.tokenizer.size)
        with self.sequences.reset_when_broken():
            logits = call.context.logits(call.sampled_rows, self.tokenizer.size)
        if self.observe is not None:
            for item, row in zip(call.sampling, logits, strict=True):
                self.observe(item.sequence, row)
        return self._step_sampler.sample(call.samplers, logits)

    def picture_tokens(self, width: int, height: int, digest: bytes) -> Tokens:
        return self._vision.tokens(width, height, digest)

    def encode_picture(self, picture: Picture) -> list[Matrix]:
        return self._vision.encode(picture)

    @property
    def _vision(self) -> Projector:
        if self._projector is None:
            raise Unsupported("This model takes no images: it is served without a projector.")
        return self._projector

    def close(self) -> None:
        self._step_sampler.close()
        self._pools.close()
        self._exact.close_all()
        if self._projector is not None:
            self._projector.close()
        self._model.close()


def _native_calls(work: Seq[Work], capabilities: Capabilities) -> list[Seq[Work]]:
    """Separate text and images into different native calls."""
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
        model.close()  # the caller may load it again without a projector
        raise
