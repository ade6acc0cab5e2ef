"""Runs MLX models with mlx_lm.

A sequence has its own caches, and is prefilled there. Decoding sequences of one KV type and similar
length share a batch. An exact sequence always computes alone, in whole steps, so the result depends
only on its own tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from typing import NamedTuple, NoReturn

import numpy as np

from rekindle.engine.base import (
    Capabilities,
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
from rekindle.engine.mlx.batches import Computation, DecodingBatches, can_batch
from rekindle.engine.mlx.layouts import Layouts
from rekindle.engine.mlx.model import LoadedModel, load_model
from rekindle.engine.mlx.prompt_caches import PromptCaches
from rekindle.engine.mlx.sequences import MlxSequences
from rekindle.engine.mlx.tokenizer import load_tokenizer
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
        self._device = memory.choose_device(options.gpu_layers)
        loaded = load_model(options, on_progress)
        self._model = loaded.model
        self.tokenizer = load_tokenizer(options.path, loaded.vocabulary_size)
        self.chat_template = self.tokenizer.chat_template
        self._layouts = Layouts(loaded.model, loaded.fingerprint)
        self._kv_type = self._layouts.named(options.kv_type)
        sizes = memory.choose_sizes(
            options,
            self._layouts.kv,
            self._kv_type,
            trained_tokens=loaded.context_tokens,
            device=self._device,
        )
        memory.wire(self._device)
        memory.limit_spare_buffers(sizes)
        self.capabilities = self._describe(sizes, loaded)
        free_bytes = partial(memory.free_bytes, self._device)
        self._batches = self._empty_batches()
        self.sequences = MlxSequences(
            self._layouts,
            sizes.pools,
            self._kv_type,
            self._batches,
            shared=sizes.sequences,
            exact=sizes.exact_sequences,
            free_bytes=free_bytes,
        )
        self.state_files = PromptCaches(self._layouts, self._kv_type, free_bytes)
        busy_cores = 0 if self._device == "gpu" else options.threads
        self._step_sampler = build_step_sampler(busy_cores)
        #: Called with the raw logits of every sampled token, so that tests can compare bits.
        self.observe: Callable[[Sequence, Row], None] | None = None

    def _describe(self, sizes: memory.MlxSizes, loaded: LoadedModel) -> Capabilities:
        return Capabilities(
            block_tokens=sizes.block_tokens,
            step_tokens=sizes.step_tokens,
            context_tokens=sizes.context_tokens,
            batch_tokens=sizes.batch_tokens,
            pool_tokens=sizes.pools[self._kv_type].cells,
            sequences=sizes.sequences,
            exact_sequences=sizes.exact_sequences,
            can_truncate=self._layouts.can_truncate,
            device=self._device,
            kv_type=self._kv_type,
            kv=self._layouts.kv,
            shares_cells=False,
            idle_is_free=True,
            async_launch=True,
            architecture=loaded.architecture,
            parameters=loaded.parameters,
            quantization=loaded.quantization,
            gpus=memory.gpus(self._device),
        )

    def _empty_batches(self) -> dict[KvType, DecodingBatches]:
        """Return batches for the KV types whose caches have a batch form."""
        return {
            kv_type: DecodingBatches(self._model, pads=layout.token_bytes > 0)
            for kv_type, layout in self._layouts.kv.items()
            if can_batch(self._layouts.make_caches(kv_type))
        }

    def launch(self, work: Seq[Work]) -> MlxPending:
        if any(item.vectors is not None for item in work):
            _refuse_pictures()
        _check_room(work, self.sequences.free_tokens)
        with self.sequences.reset_when_broken():
            computation = Computation(self._model, self._batches)
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
        work = pending.work
        chosen = {id(item): item.sampler for item in work if item.sampler is not None}
        if not chosen:
            return [None] * len(work)
        # A model may have rows for more tokens than its tokenizer knows.
        logits = np.stack([rows[each][: self.tokenizer.size] for each in chosen])
        if self.observe is not None:
            named = {id(item): item.sequence for item in work}
            for each, row in zip(chosen, logits, strict=True):
                self.observe(named[each], row)
        sampled = self._step_sampler.sample(list(chosen.values()), logits)
        results = dict(zip(chosen, sampled, strict=True))
        return [results.get(id(item)) for item in work]

    def picture_tokens(self, width: int, height: int, digest: bytes) -> Tokens:
        _refuse_pictures()

    def encode_picture(self, picture: Picture) -> list[Matrix]:
        _refuse_pictures()

    def close(self) -> None:
        self._step_sampler.close()
        self.sequences.reset()


def _check_room(work: Seq[Work], free_tokens: Callable[[KvType], int]) -> None:
    needed: dict[KvType, int] = {}
    for item in work:
        if not item.sequence.exact:
            kv_type = item.sequence.kv_type
            needed[kv_type] = needed.get(kv_type, 0) + len(item.tokens)
    if any(tokens > free_tokens(kv_type) for kv_type, tokens in needed.items()):
        raise PoolFull("no free cells for this step")


def _refuse_pictures() -> NoReturn:
    raise Unsupported("MLX models take no images: send text, or serve a GGUF model.")
