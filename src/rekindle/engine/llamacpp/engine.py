"""GGUF models through llama.cpp.

Shared sequences live in one context, the pool: they share cells and are batched together. An exact
sequence has a context to itself, a lane: its cells lie in position order and its steps never have
company, so what it computes depends on its own tokens alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from rekindle.engine.base import Abilities, Blob, Constraint, Sampler, Sequence, Work
from rekindle.engine.cells import Cells
from rekindle.engine.llamacpp import bindings
from rekindle.engine.llamacpp.context import Context, Rows, Shape
from rekindle.engine.llamacpp.kv_types import check_kv_type
from rekindle.engine.llamacpp.memory import gpu_free_bytes, host_free_bytes
from rekindle.engine.llamacpp.sampler import ChainSampler, GreedySampler, build_sampler
from rekindle.engine.llamacpp.tokenizer import Vocabulary
from rekindle.engine.sampling import Sampled
from rekindle.errors import CorruptBlock, EngineBroken, ModelError, PoolFull
from rekindle.protocol.requests import SamplingParams

LEAST_CONTEXT_TOKENS = 512
RESIDENT_SEQUENCES = 32  # idle conversations that may stay in the pool beside the active ones
STATE_FORMAT = "llama.cpp state, xllamacpp 2026.10.11549, unified, flash attention, "  # + KV type

Progress = Callable[[float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaCppOptions:
    """How to load a model; None lets the engine choose."""

    path: Path
    parallel: int = 16
    context_tokens: int | None = None
    kv_fraction: float = 0.3  # of the free memory, for the KV pool
    threads: int = 4
    gpu_layers: int | None = None
    kv_type: str = "f16"  # of the KV cells: "f16" or "q8_0"


@dataclass(frozen=True, slots=True)
class StateBytes:
    """A block of n tokens has fixed + n * each bytes, and a checkpoint's more where there is one;
    anything else is not a block of ours."""

    fixed: int
    each: int
    checkpoint: int  # 0: state can be cut anywhere, so there are none


class LlamaCppEngine:
    def __init__(self, options: LlamaCppOptions, progress: Progress = lambda _done: None) -> None:
        self._library = bindings.load_library()
        self._on_gpu = bool(self._library.llama_supports_gpu_offload())
        self._model = self._load(options, progress)
        self.vocabulary = Vocabulary(self._library, self._model)
        check_kv_type(self._library, self._model, options.kv_type)
        self._kv_type = options.kv_type
        self._fingerprint = _fingerprint(options.path, options.kv_type)
        self._parallel = options.parallel
        self._threads = options.threads
        self._step_tokens = 512 if self._on_gpu else 64
        self._context_tokens, cells = self._choose_cells(options)
        self._pool = self._build_pool(cells)
        self._cells = Cells(self._pool.shape.cells)
        self._lanes: dict[int, Context] = {}  # exact sequence slot -> its context
        self._idle_lanes: list[Context] = []
        self._slots = list(reversed(range(self._pool.shape.sequences)))
        self._state_bytes = _measure_state(self._pool)
        #: Called with every wanted row's raw logits; how tests compare runs bit by bit.
        self.observe: Callable[[Sequence, np.ndarray[Any, Any]], None] | None = None

    # -- loading -------------------------------------------------------------------------------

    def _load(self, options: LlamaCppOptions, progress: Progress) -> int:
        params = self._library.llama_model_default_params()
        everything = 999
        if options.gpu_layers is not None:
            params.n_gpu_layers = options.gpu_layers
        else:
            params.n_gpu_layers = everything if self._on_gpu else 0

        def on_progress(done: float, _data: object) -> bool:
            progress(done)
            return True

        callback = bindings.ProgressCallback(on_progress)
        params.progress_callback = ctypes.cast(callback, ctypes.c_void_p)
        model = self._library.llama_model_load_from_file(str(options.path).encode(), params)
        if not model:
            raise ModelError(
                f"llama.cpp cannot load {options.path.name}: the file is damaged, or its "
                "architecture is newer than the pinned llama.cpp"
            )
        if self._library.llama_model_has_encoder(model):
            raise ModelError(f"{options.path.name} is not a text generation model")
        return int(model)

    def _choose_cells(self, options: LlamaCppOptions) -> tuple[int, int]:
        """Context and pool, in tokens: what was asked for, or else what memory allows."""
        state = self._sample_state()
        slots_bytes = state.checkpoint * (self._sequences + 1)  # taken whatever the cells are
        budget = int(options.kv_fraction * self._free_bytes()) - slots_bytes
        affordable = max(budget, 0) // max(state.each, 1)
        trained = int(self._library.llama_model_n_ctx_train(self._model))
        context = options.context_tokens or min(trained, max(affordable, LEAST_CONTEXT_TOKENS))
        # Idle cells are free on a GPU, but slow every step down on a CPU.
        useful = context * (options.parallel if self._on_gpu else 2)
        return context, max(context, min(affordable, useful))

    def _free_bytes(self) -> int:
        return gpu_free_bytes(self._library) if self._on_gpu else host_free_bytes()

    @property
    def _sequences(self) -> int:
        """Those that run, and idle ones; recurrent state costs each slot, used or not."""
        residents = RESIDENT_SEQUENCES if self._can_cut else 0
        return min(self._parallel + residents, bindings.MAX_SEQUENCES - 1)

    def _build_pool(self, cells: int) -> Context:
        batch = (2048 if self._on_gpu else 512) + self._parallel
        return Context(
            self._library,
            self._model,
            self._shape(cells=cells, sequences=self._sequences, batch=batch),
        )

    def _shape(self, *, cells: int, sequences: int, batch: int) -> Shape:
        return Shape(
            cells=cells,
            sequences=sequences,
            threads=self._threads,
            batch=batch,
            kv_type=self._kv_type,
            recurrent=not self._can_cut,
        )

    def _sample_state(self) -> StateBytes:
        """What state takes, measured on a throw-away context."""
        shape = self._shape(cells=256, sequences=1, batch=8)
        context = Context(self._library, self._model, shape)
        try:
            return _measure_state(context)
        finally:
            context.close()

    @property
    def abilities(self) -> Abilities:
        return Abilities(
            block_tokens=self._block_tokens,
            step_tokens=self._step_tokens,
            context_tokens=self._context_tokens,
            batch_tokens=self._pool.shape.batch,
            pool_tokens=self._pool.shape.cells,
            sequences=self._pool.shape.sequences,
            exact_sequences=self._parallel,
            can_cut=self._can_cut,
            vocabulary=self.vocabulary.size,
            token_bytes=self._state_bytes.each,
            checkpoint_bytes=self._state_bytes.checkpoint,
            fingerprint=self._fingerprint,
        )

    @property
    def _block_tokens(self) -> int:
        """A power of two, and no more than a sliding window: llama.cpp leaves out of a state what
        lies behind the window of its last token."""
        usual = 256 if self._on_gpu else 64
        window = int(self._library.llama_model_n_swa(self._model))
        return min(usual, 1 << (window.bit_length() - 1)) if window > 0 else usual

    @property
    def _can_cut(self) -> bool:
        """Recurrent state is of one position and cannot be taken apart."""
        recurrent = self._library.llama_model_is_recurrent(self._model)
        return not (recurrent or self._library.llama_model_is_hybrid(self._model))

    @property
    def on_gpu(self) -> bool:
        return self._on_gpu

    @property
    def chat_template(self) -> str | None:
        source = self._library.llama_model_chat_template(self._model, None)
        return source.decode(errors="replace") if source else None

    @property
    def free_tokens(self) -> int:
        return self._cells.free

    # -- sequences -----------------------------------------------------------------------------

    def open(self, *, exact: bool) -> Sequence:
        if exact:
            return self._open_lane()
        if not self._slots:
            raise PoolFull("all sequences are open")
        return Sequence(self._slots.pop(), exact=False)

    def _open_lane(self) -> Sequence:
        if len(self._lanes) >= self._parallel:
            raise PoolFull("all exact sequences are open")
        lane = self._idle_lanes.pop() if self._idle_lanes else self._build_lane()
        lane.clear()
        slot = next(n for n in range(self._parallel) if n not in self._lanes)
        self._lanes[slot] = lane
        return Sequence(slot, exact=True)

    def _build_lane(self) -> Context:
        shape = self._shape(cells=self._context_tokens, sequences=1, batch=self._step_tokens)
        return Context(self._library, self._model, shape)

    def close_sequence(self, sequence: Sequence) -> None:
        if sequence.exact:
            self._idle_lanes.append(self._lanes.pop(sequence.slot))
        else:
            self._pool.remove(sequence.slot)
            self._cells.close(sequence.slot)
            self._slots.append(sequence.slot)
        sequence.length = 0

    def share(self, source: Sequence, tokens: int, into: Sequence) -> None:
        if into.length or source.exact or into.exact:
            raise ValueError("only shared sequences share, and only into an empty one")
        if tokens != source.length and not self._can_cut:
            raise ValueError("this model's state is shared whole or not at all")
        self._pool.share(source.slot, into.slot, tokens)
        self._cells.share(source.slot, tokens, into.slot)
        into.length = tokens

    def cut(self, sequence: Sequence, tokens: int) -> None:
        if tokens >= sequence.length:
            return
        if tokens and not self._can_cut:
            raise ValueError("this model's state cannot be cut")
        context, slot = self._home(sequence)
        with self._reset_when_broken():
            context.remove(slot, tokens)
        if not sequence.exact:
            self._cells.cut(slot, tokens)
        sequence.length = tokens

    def export(
        self, sequence: Sequence, start: int, stop: int, *, resumable: bool = False
    ) -> bytes:
        if resumable and stop != sequence.length:
            raise ValueError("a checkpoint is of where the sequence stands")
        context, slot = self._home(sequence)
        with self._reset_when_broken():
            blob = context.export(slot, start, stop)
            return blob + context.checkpoint(slot) if resumable else blob

    def restore(self, into: Sequence, blob: Blob, tokens: int, *, resumable: bool = False) -> None:
        cells, checkpoint = self._take_apart(blob, tokens, resumable)
        if not into.exact and self._cells.free < tokens:
            raise PoolFull("no free cells for this block")
        context, slot = self._home(into)
        stop = into.length + tokens
        with self._reset_when_broken():
            context.restore(slot, into.length, stop, cells)
            if resumable:
                context.resume(slot, checkpoint)
                if not context.reaches(slot, stop):
                    raise EngineBroken("a checkpoint is of another position")
        if not into.exact:
            self._cells.append(slot, tokens)
        into.length = stop

    def _take_apart(
        self, blob: Blob, tokens: int, resumable: bool
    ) -> tuple[memoryview, memoryview]:
        """A block's cells and its checkpoint, whose sizes are checked before llama.cpp sees a
        byte."""
        view = memoryview(blob).cast("B")
        cells = self._state_bytes.fixed + tokens * self._state_bytes.each
        if len(view) != cells + resumable * self._state_bytes.checkpoint:
            raise CorruptBlock(f"a block of {tokens} tokens cannot have {len(view)} bytes")
        return view[:cells], view[cells:]

    def _home(self, sequence: Sequence) -> tuple[Context, int]:
        if sequence.exact:
            return self._lanes[sequence.slot], 0
        return self._pool, sequence.slot

    @contextmanager
    def _reset_when_broken(self) -> Iterator[None]:
        """An undefined memory is never gone on with: build it again, empty."""
        try:
            yield
        except EngineBroken:
            self.reset()
            raise

    def reset(self) -> None:
        """Forget every sequence and rebuild the native memory."""
        self._pool.rebuild()
        self._cells.clear()
        self._slots = list(reversed(range(self._pool.shape.sequences)))
        for lane in (*self._lanes.values(), *self._idle_lanes):
            lane.close()
        self._lanes.clear()
        self._idle_lanes.clear()

    # -- computing -----------------------------------------------------------------------------

    def sampler(
        self, sampling: SamplingParams, prompt: Seq[int], constraint: Constraint | None = None
    ) -> Sampler:
        return build_sampler(self._library, self.vocabulary.size, sampling, prompt, constraint)

    def step(self, work: Seq[Work]) -> list[Sampled | None]:
        results: dict[int, Sampled | None] = {}
        shared = [item for item in work if not item.sequence.exact]
        if sum(len(item.tokens) for item in shared) > self._cells.free:
            raise PoolFull("no free cells for this step")  # a recurrent memory has no cells to lack
        if shared:
            results.update(self._step_in(self._pool, shared))
        for item in work:
            if item.sequence.exact:
                results.update(self._step_in(self._lanes[item.sequence.slot], [item]))
        return [results[id(item)] for item in work]

    def _step_in(self, context: Context, work: Seq[Work]) -> dict[int, Sampled | None]:
        rows = [
            Rows(
                0 if item.sequence.exact else item.sequence.slot,
                item.sequence.length,
                item.tokens,
                item.sampler is not None,
            )
            for item in work
        ]
        with self._reset_when_broken():
            last = context.decode(rows)
        results: dict[int, Sampled | None] = {}
        for item, index in zip(work, last, strict=True):
            if not item.sequence.exact:
                self._cells.append(item.sequence.slot, len(item.tokens))
            item.sequence.length += len(item.tokens)
            results[id(item)] = self._sample(context, item, index)
        return results

    def _sample(self, context: Context, item: Work, index: int) -> Sampled | None:
        if item.sampler is None:
            return None
        if self.observe is not None:
            self.observe(item.sequence, context.logits(index, self.vocabulary.size))
        assert isinstance(item.sampler, ChainSampler | GreedySampler)
        return item.sampler.sample(
            context.native, index, lambda: context.logits(index, self.vocabulary.size)
        )

    def close(self) -> None:
        for context in (self._pool, *self._lanes.values(), *self._idle_lanes):
            context.close()
        self._library.llama_model_free(self._model)


def _measure_state(context: Context) -> StateBytes:
    """Export blocks of one and of two tokens, and forget them."""
    context.decode([Rows(0, 0, [0, 0], False)])
    one, two = (len(context.export(0, 0, tokens)) for tokens in (1, 2))
    checkpoint = len(context.checkpoint(0)) if context.shape.recurrent else 0
    context.clear()
    return StateBytes(2 * one - two, two - one, checkpoint)


def _fingerprint(path: Path, kv_type: str) -> bytes:
    """Weights, tokenizer and template are one file: its hash, with the state's layout."""
    weights = blake3(max_threads=blake3.AUTO).update_mmap(path).digest()
    return blake3((STATE_FORMAT + kv_type).encode() + weights).digest()
