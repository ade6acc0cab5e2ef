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

from rekindle.engine.base import Abilities, Blob, Sampler, Sequence, Work
from rekindle.engine.cells import Cells
from rekindle.engine.llamacpp import bindings
from rekindle.engine.llamacpp.context import Context, Rows, Shape
from rekindle.engine.llamacpp.kv import check_kv_type
from rekindle.engine.llamacpp.memory import gpu_free_bytes, host_free_bytes
from rekindle.engine.llamacpp.sampler import ChainSampler, GreedySampler, build_sampler
from rekindle.engine.llamacpp.vocabulary import Vocabulary
from rekindle.engine.sampling import Sampled, Sampling
from rekindle.errors import CorruptBlock, EngineBroken, ModelError, PoolFull

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
        self._state_bytes = self._measure_state()
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
        affordable = int(options.kv_fraction * self._free_bytes()) // self._cell_bytes()
        trained = int(self._library.llama_model_n_ctx_train(self._model))
        context = options.context_tokens or min(trained, max(affordable, LEAST_CONTEXT_TOKENS))
        # Idle cells are free on a GPU, but slow every step down on a CPU.
        useful = context * (options.parallel if self._on_gpu else 2)
        return context, max(context, min(affordable, useful))

    def _free_bytes(self) -> int:
        return gpu_free_bytes(self._library) if self._on_gpu else host_free_bytes()

    def _build_pool(self, cells: int) -> Context:
        residents = RESIDENT_SEQUENCES if self._can_cut else 0
        sequences = min(self._parallel + residents, bindings.MAX_SEQUENCES - 1)
        batch = (2048 if self._on_gpu else 512) + self._parallel
        return Context(
            self._library,
            self._model,
            self._shape(cells=cells, sequences=sequences, batch=batch),
        )

    def _shape(self, *, cells: int, sequences: int, batch: int) -> Shape:
        return Shape(
            cells=cells,
            sequences=sequences,
            threads=self._threads,
            batch=batch,
            kv_type=self._kv_type,
        )

    def _cell_bytes(self) -> int:
        """Bytes of one token's state, measured on a throw-away context."""
        shape = self._shape(cells=256, sequences=1, batch=8)
        context = Context(self._library, self._model, shape)
        try:
            context.decode([Rows(0, 0, [0], False)])
            return len(context.export(0, 0, 1))
        finally:
            context.close()

    def _measure_state(self) -> tuple[int, int]:
        """A block of n tokens has fixed + n * each bytes; anything else is not a block of ours."""
        self._pool.decode([Rows(0, 0, [0, 0], False)])
        one, two = (len(self._pool.export(0, 0, n)) for n in (1, 2))
        self._pool.clear()
        return 2 * one - two, two - one

    @property
    def abilities(self) -> Abilities:
        return Abilities(
            block_tokens=256 if self._on_gpu else 64,
            step_tokens=self._step_tokens,
            context_tokens=self._context_tokens,
            batch_tokens=self._pool.shape.batch,
            pool_tokens=self._pool.shape.cells,
            sequences=self._pool.shape.sequences,
            exact_sequences=self._parallel,
            can_cut=self._can_cut,
            vocabulary=self.vocabulary.size,
            token_bytes=self._state_bytes[1],
            fingerprint=self._fingerprint,
        )

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
        self._pool.share(source.slot, into.slot, tokens)
        self._cells.share(source.slot, tokens, into.slot)
        into.length = tokens

    def cut(self, sequence: Sequence, tokens: int) -> None:
        if tokens >= sequence.length:
            return
        context, slot = self._home(sequence)
        with self._reset_when_broken():
            context.remove(slot, tokens)
        if not sequence.exact:
            self._cells.cut(slot, tokens)
        sequence.length = tokens

    def export(self, sequence: Sequence, start: int, stop: int) -> bytes:
        context, slot = self._home(sequence)
        with self._reset_when_broken():
            return context.export(slot, start, stop)

    def restore(self, into: Sequence, blob: Blob, tokens: int) -> None:
        fixed, each = self._state_bytes
        if len(blob) != fixed + tokens * each:  # before llama.cpp sees a byte
            raise CorruptBlock(f"a block of {tokens} tokens cannot have {len(blob)} bytes")
        if not into.exact and self._cells.free < tokens:
            raise PoolFull("no free cells for this block")
        context, slot = self._home(into)
        with self._reset_when_broken():
            context.restore(slot, into.length, into.length + tokens, blob)
        if not into.exact:
            self._cells.append(slot, tokens)
        into.length += tokens

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

    def sampler(self, sampling: Sampling, prompt: Seq[int]) -> Sampler:
        return build_sampler(self._library, self.vocabulary.size, sampling, prompt)

    def step(self, work: Seq[Work]) -> list[Sampled | None]:
        results: dict[int, Sampled | None] = {}
        shared = [item for item in work if not item.sequence.exact]
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


def _fingerprint(path: Path, kv_type: str) -> bytes:
    """Weights, tokenizer and template are one file: its hash, with the state's layout."""
    weights = blake3(max_threads=blake3.AUTO).update_mmap(path).digest()
    return blake3((STATE_FORMAT + kv_type).encode() + weights).digest()
