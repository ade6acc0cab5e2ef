"""Runs MLX models with mlx_lm.

A sequence has its own caches, and is prefilled there. Decoding sequences of one KV type and similar
length share a batch. An exact sequence always computes alone, in whole steps, so the result depends
only on its own tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from typing import NamedTuple

import numpy as np

from rekindle.engine.base import (
    EngineOptions,
    KvType,
    Matrix,
    OnProgress,
    Pending,
    Row,
    Sampled,
    Sequence,
    Work,
)
from rekindle.engine.mlx import memory
from rekindle.engine.mlx.batches import Computation, DecodingBatches, added_tokens, can_batch
from rekindle.engine.mlx.layouts import Layouts
from rekindle.engine.mlx.model import load_model
from rekindle.engine.mlx.prompt_caches import PromptCaches
from rekindle.engine.mlx.sequences import MlxSequences
from rekindle.engine.mlx.tokenizer import load_tokenizer
from rekindle.engine.mlx.vision import Vision, load_vision_model
from rekindle.engine.sampling.sampler import TokenSampler, build_step_sampler
from rekindle.errors import PoolFull, Unsupported
from rekindle.protocol.requests import Picture
from rekindle.tokens import Tokens


class MlxPending(NamedTuple):
    """A launched step."""

    work: Seq[Work]
    computation: Computation


class MlxEngine:
    """Implements `engine.base.Engine`."""

    sampler = TokenSampler

    def __init__(
        self, options: EngineOptions, on_progress: OnProgress = lambda _done: None
    ) -> None:
        memory.check_gpus(options)
        device = memory.choose_device(options.gpu_layers)
        load = load_vision_model if options.mmproj else load_model
        loaded = load(options, on_progress)
        self._model = loaded.model
        self.tokenizer = load_tokenizer(options.path, loaded.vocabulary_size)
        self._vision = (
            Vision(loaded.model, options.path, self.tokenizer) if options.mmproj else None
        )
        self.chat_template = self.tokenizer.chat_template
        can_quantise = not memory.is_cuda(device)
        layouts = Layouts(loaded.model, loaded.fingerprint, can_quantise=can_quantise)
        self.capabilities, pools = memory.plan_memory(options, loaded, layouts, device)
        memory.wire(device)
        free_bytes = partial(memory.free_bytes, device)
        self._batches = {
            kv_type: DecodingBatches(self._model, pads=layout.token_bytes > 0)
            for kv_type, layout in layouts.kv.items()
            if can_batch(layouts.make_caches(kv_type))
        }
        self.sequences = MlxSequences(layouts, self.capabilities, pools, self._batches, free_bytes)
        self.state_files = (
            None  # mlx_lm has no such caches
            if layouts.has_positions
            else PromptCaches(layouts, self.capabilities.kv_type, free_bytes)
        )
        busy_cores = 0 if device == "gpu" else options.threads
        self._step_sampler = build_step_sampler(busy_cores)
        #: Called with the raw logits of every sampled token, so that tests can compare bits.
        self.observe: Callable[[Sequence, Row], None] | None = None

    def launch(self, work: Seq[Work]) -> MlxPending:
        for item in work:
            if item.vectors is not None and item.vectors.shape != self._seeing.shape(item.tokens):
                raise ValueError("these are not the vectors of this image")
        _check_room(work, self.sequences.free_tokens)
        with self.sequences.reset_when_broken():
            computation = Computation(self._model, self._batches, self.sequences.free_tokens)
            computation.add(work)
            computation.start()
        for item in work:
            self.sequences.grow(item.sequence, len(item.tokens))
        return MlxPending(work, computation)

    def launch_next(self, pending: Pending, tokens: Seq[int]) -> MlxPending:
        items = zip(pending.work, tokens, strict=True)
        return self.launch([item._replace(tokens=[token]) for item, token in items])

    def collect(self, pending: Pending) -> list[Sampled | None]:
        assert isinstance(pending, MlxPending)
        with self.sequences.reset_when_broken():
            rows = pending.computation.wait()
        sampling = [item for item in pending.work if item.sampler is not None]
        if not sampling:
            return [None] * len(pending.work)
        # A model may have rows for more tokens than its tokenizer knows.
        logits = np.stack([rows[id(item)][: self.tokenizer.size] for item in sampling])
        if self.observe is not None:
            for item, row in zip(sampling, logits, strict=True):
                self.observe(item.sequence, row)
        samplers = [item.sampler for item in pending.work if item.sampler is not None]
        sampled = iter(self._step_sampler.sample(samplers, logits))
        return [None if item.sampler is None else next(sampled) for item in pending.work]

    def picture_tokens(self, width: int, height: int, digest: bytes) -> Tokens:
        return self._seeing.tokens(width, height, digest)

    def encode_picture(self, picture: Picture) -> list[Matrix]:
        return self._seeing.encode(picture)

    @property
    def _seeing(self) -> Vision:
        if self._vision is None:
            raise Unsupported(
                "This model takes no images: send text, or serve an MLX vision model with --vlm."
            )
        return self._vision

    def close(self) -> None:
        self._step_sampler.close()
        self.sequences.reset()


def _check_room(work: Seq[Work], free_tokens: Callable[[KvType], int]) -> None:
    kv_types = {item.sequence.kv_type for item in work if not item.sequence.exact}
    if any(added_tokens(work, kv_type) > free_tokens(kv_type) for kv_type in kv_types):
        raise PoolFull("no free cells for this step")
