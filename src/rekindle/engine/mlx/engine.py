"""MLX models through mlx_lm.

A sequence's state is in caches of its own; prompts are read there, a sequence at a time. Sequences
of one KV type and of similar length that decode have a batch together. An exact sequence always
computes alone, in whole steps: what it computes depends on its own tokens alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from functools import partial
from typing import NoReturn

import mlx.core as mx
import numpy as np

from rekindle.engine.base import (
    Blob,
    Capabilities,
    EngineOptions,
    GoOn,
    KvType,
    Matrix,
    OnProgress,
    Row,
    Sampled,
    Sampler,
    Sequence,
    TokenMask,
    Work,
    nothing_meanwhile,
)
from rekindle.engine.mlx import memory, state
from rekindle.engine.mlx.batches import Computation, DecodingBatches, can_batch
from rekindle.engine.mlx.layouts import Layouts
from rekindle.engine.mlx.model import LoadedModel, load_model
from rekindle.engine.mlx.prompt_caches import PromptCaches
from rekindle.engine.mlx.sequences import MlxSequence, Sequences
from rekindle.engine.mlx.tokenizer import load_tokenizer
from rekindle.engine.sampling.sampler import build_sampler
from rekindle.engine.sampling.step import build_step_sampler
from rekindle.engine.steps import run_on
from rekindle.errors import CorruptBlock, EngineBroken, PoolFull, Unsupported
from rekindle.memory import plain_memory
from rekindle.protocol.media import Picture
from rekindle.protocol.requests import SamplingParams
from rekindle.tokens import Tokens


class MlxEngine:
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
        self._sequences = Sequences(
            sizes.pools,
            self._kv_type,
            shared=sizes.sequences,
            exact=sizes.exact_sequences,
            free_bytes=free_bytes,
        )
        self._batches = self._empty_batches()
        self.allocate = plain_memory
        self.meanwhile = nothing_meanwhile
        self.parking = None  # idle caches slow nobody down where they are
        self.state_files = PromptCaches(self._layouts, self._kv_type, free_bytes)
        busy_cores = 0 if self._device == "gpu" else options.threads
        self._step_sampler = build_step_sampler(busy_cores)
        #: Called with the raw logits behind every choice; how tests compare runs bit by bit.
        self.observe: Callable[[Sequence, Row], None] | None = None

    def _describe(self, sizes: memory.Sizes, loaded: LoadedModel) -> Capabilities:
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
            architecture=loaded.architecture,
            parameters=loaded.parameters,
            quantization=loaded.quantization,
            gpus=memory.gpus(self._device),
        )

    def _empty_batches(self) -> dict[KvType, DecodingBatches]:
        """For the KV types whose caches have a batch form."""
        return {
            kv_type: DecodingBatches(self._model, pads=layout.token_bytes > 0)
            for kv_type, layout in self._layouts.kv.items()
            if can_batch(self._layouts.make_caches(kv_type))
        }

    def free_tokens(self, kv_type: KvType | None = None) -> int:
        return self._sequences.cells(kv_type or self._kv_type).free

    def freed_tokens(self, sequences: Seq[Sequence]) -> int:
        if not sequences:
            return 0
        cells = self._sequences.cells(sequences[0].kv_type)
        return cells.freed(sequence.slot for sequence in sequences)

    # -- sequences -----------------------------------------------------------------------------

    def open(self, *, exact: bool, kv_type: KvType | None = None) -> MlxSequence:
        kv_type = kv_type or self._kv_type
        caches = self._layouts.make_caches(kv_type)
        return self._sequences.open(exact=exact, kv_type=kv_type, caches=caches)

    def close_sequence(self, sequence: Sequence) -> None:
        self._sequences.close(_ours(sequence))

    def share(self, source: Sequence, tokens: int, into: Sequence) -> None:
        if into.length or source.exact or into.exact or source.kv_type != into.kv_type:
            raise ValueError("only shared sequences of one KV type share, and into an empty one")
        if tokens != source.length and not self.capabilities.can_truncate:
            raise ValueError("this model's state is shared whole or not at all")
        if tokens:
            _ours(into).caches = state.share(_ours(source).read(), tokens)
        self._sequences.grow(into, tokens)

    def truncate(self, sequence: Sequence, tokens: int) -> None:
        if tokens >= sequence.length:
            return
        if tokens and not self.capabilities.can_truncate:
            raise ValueError("this model's state cannot be truncated")
        state.truncate(_ours(sequence).take(), tokens)
        self._sequences.truncate(sequence, tokens)

    def export(
        self, sequence: Sequence, start: int, stop: int, *, resumable: bool = False
    ) -> bytes:
        if resumable and stop != sequence.length:
            raise ValueError("a checkpoint is of the sequence's end")
        layout = self._layouts[sequence.kv_type]
        with self._reset_when_broken():
            return layout.export_block(_ours(sequence).read(), start, stop, resumable=resumable)

    def restore(self, into: Sequence, blob: Blob, tokens: int, *, resumable: bool = False) -> None:
        if not into.exact and self.free_tokens(into.kv_type) < tokens:
            raise PoolFull("no free cells for this block")
        layout, stop = self._layouts[into.kv_type], into.length + tokens
        caches = _ours(into).take()
        with self._reset_when_broken():
            layout.restore_block(caches, blob, into.length, stop, resumable=resumable)
        self._sequences.grow(into, tokens)

    def transcode(
        self, blob: Blob, tokens: int, source: KvType, target: KvType, *, resumable: bool = False
    ) -> bytes:
        return self._layouts.transcode(blob, tokens, source, target, resumable=resumable)

    @contextmanager
    def _reset_when_broken(self) -> Iterator[None]:
        """Caches are changed before anything is computed: when that fails they are undefined."""
        try:
            yield
        except CorruptBlock:  # nothing has been changed
            raise
        except Exception as error:
            self.reset()
            raise EngineBroken(f"MLX could not compute: {error}") from error

    def reset(self) -> None:
        self._sequences.clear()
        self._batches = self._empty_batches()
        mx.clear_cache()

    def release_idle(self) -> None:
        """A batch that nobody decodes in any more holds padding and rows that are of no use."""
        for batches in self._batches.values():
            batches.shrink()
        mx.clear_cache()

    # -- computing -----------------------------------------------------------------------------

    def sampler(
        self, sampling: SamplingParams, prompt: Seq[int], token_mask: TokenMask | None = None
    ) -> Sampler:
        return build_sampler(sampling, prompt, token_mask)

    def step(self, work: Seq[Work], go_on: GoOn | None = None) -> list[Sampled | None]:
        return run_on(self._step, work, go_on)

    def _step(self, work: Seq[Work]) -> list[Sampled | None]:
        if any(item.vectors is not None for item in work):
            _refuse_pictures()
        _check_room(work, self.free_tokens)
        with self._reset_when_broken():
            computation = Computation(self._model, self._batches)
            computation.add(work)
            rows = computation.run()
        for item in work:
            self._sequences.grow(item.sequence, len(item.tokens))
        return self._sample(work, rows)

    def _sample(self, work: Seq[Work], rows: Mapping[int, Row]) -> list[Sampled | None]:
        chosen = {id(item): item.sampler for item in work if item.sampler is not None}
        if not chosen:
            return [None] * len(work)
        # A model may have rows for more than its tokenizer knows.
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
        self.reset()


def _ours(sequence: Sequence) -> MlxSequence:
    assert isinstance(sequence, MlxSequence)
    return sequence


def _check_room(work: Seq[Work], free_tokens: Callable[[KvType], int]) -> None:
    needed: dict[KvType, int] = {}
    for item in work:
        if not item.sequence.exact:
            kv_type = item.sequence.kv_type
            needed[kv_type] = needed.get(kv_type, 0) + len(item.tokens)
    if any(tokens > free_tokens(kv_type) for kv_type, tokens in needed.items()):
        raise PoolFull("no free cells for this step")


def _refuse_pictures() -> NoReturn:
    raise Unsupported("MLX models are served without pictures: send text, or serve a GGUF model.")
