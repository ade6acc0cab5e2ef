"""Wraps llama.cpp contexts: their KV cells, the native calls on them, and their threads."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np

from rekindle.engine.base import Blob, Matrix
from rekindle.engine.llamacpp import bindings
from rekindle.engine.llamacpp.batch import BatchArrays, BatchRows, SequencePositions, split_places
from rekindle.engine.llamacpp.state import cut_cells
from rekindle.engine.llamacpp.step_threads import OtherPrograms, StepThreads
from rekindle.errors import EngineBroken, ModelError, PoolFull
from rekindle.memory import Allocate, plain_memory


class Memory:
    """The cells of a native context, by slot and position. `flags` select the kind of state."""

    def __init__(self, library: Any, native: int) -> None:
        self._library = library
        self._native = native
        self._memory = library.llama_get_memory(native)

    def clear(self) -> None:
        """Remove all cells. The next ones are placed from the first cell on."""
        self._library.llama_memory_clear(self._memory, False)

    def copy(self, source: int, into: int, first: int = -1, stop: int = -1) -> None:
        """Let another slot share cells. -1 stands for the beginning and the end."""
        self._library.llama_memory_seq_cp(self._memory, source, into, first, stop)

    def remove(self, slot: int, first: int = -1) -> bool:
        """Remove the cells of a slot from a position on. Returns False if llama.cpp refuses."""
        return bool(self._library.llama_memory_seq_rm(self._memory, slot, first, -1))

    def span(self, slot: int) -> tuple[int, int]:
        return (
            self._library.llama_memory_seq_pos_min(self._memory, slot),
            self._library.llama_memory_seq_pos_max(self._memory, slot),
        )

    def read(self, slot: int, flags: int, allocate: Allocate = plain_memory) -> memoryview:
        size = self._library.llama_state_seq_get_size_ext(self._native, slot, flags)
        state = allocate(size)
        into = _address(state)
        written = self._library.llama_state_seq_get_data_ext(self._native, into, size, slot, flags)
        if written != size:
            raise EngineBroken(f"llama.cpp exported {written} of {size} bytes")
        return state

    def snapshot(self, slot: int, max_bytes: int) -> bytes:
        """Copy the cells of a slot to device memory, and return the record that restores them.

        `max_bytes` bounds the record. Asking llama.cpp for its size takes half as long as the copy.
        """
        flags, into = bindings.STATE_ON_DEVICE, plain_memory(max_bytes)
        written = self._library.llama_state_seq_get_data_ext(
            self._native, _address(into), max_bytes, slot, flags
        )
        return bytes(into[:written]) if written else bytes(self.read(slot, flags))

    def write(self, slot: int, blob: Blob, flags: int) -> None:
        source, size = _address(blob), len(blob)
        read = self._library.llama_state_seq_set_data_ext(self._native, source, size, slot, flags)
        if read != size:
            raise EngineBroken("llama.cpp rejected a block")


def _address(memory: Blob) -> Any:
    return np.frombuffer(memory, np.uint8).ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    cells: int
    sequences: int
    threads: int
    may_use_fewer: bool = False  # threads, while other programs want a core
    batch: int  # largest number of rows in one native call
    spare_cells: int = 0  # additional cells that no sequence may hold
    size_bytes: int = 0  # memory of the cells; only of shapes that are built on demand
    kv_type: str = "f16"
    original_tokens: int = 0  # of a LongRoPE model; 0: the value in the file
    recurrent: bool = False  # some state belongs to one position and cannot be cut
    adapter: int = 0  # the native LoRA adapter; 0: none
    has_places: bool = False  # tokens of a picture share a position and have a place each (M-RoPE)


class Context:
    """Owns a native context. Slot `scratch` is used to move blocks.

    After EngineBroken the memory is undefined: it may hold part of a batch or of a rejected
    restore. The owner has to rebuild the context.
    """

    def __init__(self, library: Any, model: int, shape: Shape) -> None:
        self._library = library
        self._model = model
        self.shape = shape
        self.scratch = shape.sequences  # one more than the slots of sequences
        self._batch = BatchArrays(shape.batch)
        self._native: int | None = None
        self.positions = defaultdict[int, SequencePositions](SequencePositions)  # by slot
        self._logits: dict[tuple[int, int], Matrix] = {}  # views by address and rows
        self._build()

    def _build(self) -> None:
        params = self._library.llama_context_default_params()
        params.n_ctx = self.shape.cells + self.shape.spare_cells
        params.n_batch = params.n_ubatch = self.shape.batch
        params.n_seq_max = self.shape.sequences + 1
        params.n_outputs_max = params.n_seq_max  # otherwise each token gets a row of logits
        params.n_threads = params.n_threads_batch = self.shape.threads
        params.flash_attn_type = bindings.FLASH_ATTENTION_ENABLED
        params.kv_unified = True
        params.yarn_orig_ctx = self.shape.original_tokens
        params.type_k = params.type_v = bindings.GGML_TYPES[self.shape.kv_type]
        native = self._library.llama_init_from_model(self._model, params)
        if not native:
            raise ModelError(
                f"llama.cpp could not build a context of {self.shape.cells} tokens; "
                "lower --max-model-len, --parallel or --kv-fraction"
            )
        self._native = native
        if self.shape.adapter:
            self._apply_adapter(native)
        self._threads: StepThreads | None = None
        if self.shape.may_use_fewer and self.shape.threads > 1:
            set_threads = self._library.llama_set_n_threads
            self._threads = StepThreads(
                self.shape.threads,
                lambda n: set_threads(native, n, n),
                OtherPrograms().idle_cores,
            )
        self.memory = Memory(self._library, native)
        self._nothing = self.checkpoint(self.scratch) if self.shape.recurrent else b""

    def _apply_adapter(self, native: int) -> None:
        """Add the adapter to the weights, in every native call of this context."""
        adapters, scales = (ctypes.c_void_p * 1)(self.shape.adapter), (ctypes.c_float * 1)(1.0)
        if self._library.llama_set_adapters_lora(native, adapters, 1, scales):
            raise ModelError("llama.cpp cannot apply this adapter to the model")

    def rebuild(self) -> None:
        self.close()
        self.positions.clear()
        self._logits.clear()
        self._build()

    def close(self) -> None:
        if self._native:
            self._library.llama_free(self._native)
            self._native = None
            del self.memory

    @property
    def native(self) -> int:
        assert self._native is not None, "context is closed"
        return self._native

    def decode(self, rows: Seq[BatchRows], *, causal: bool = True) -> list[int]:
        """Compute all rows in one native call, and return the batch index of the last row of each
        run.

        Runs start at token numbers, which are translated to positions. Unless `causal`, rows also
        see later rows.
        """
        placed = [self._placed(run) for run in rows] if self.shape.has_places else rows
        batch, last = self._batch.fill(placed)
        if not causal:
            self._library.llama_set_causal_attn(self.native, False)
        try:
            status = self._compute(batch, is_prefill=last[-1] >= len(rows))
        finally:
            if not causal:
                self._library.llama_set_causal_attn(self.native, True)
        _check(status)
        for run, own in zip(rows, placed, strict=True) if self.shape.has_places else ():
            if own.places is not None:
                positions = self.positions[run.slot]
                self.positions[run.slot] = positions.with_picture(run.start, own.places)
        return last

    def decode_next(self, tokens: Seq[int]) -> None:
        """Compute the next row of each sequence, after a call with a single row of each."""
        _check(self._compute(self._batch.advance(tokens), is_prefill=False))

    def _compute(self, batch: bindings.LlamaBatch, *, is_prefill: bool) -> int:
        """Return the status of the native call."""
        if self._threads is None:
            return int(self._library.llama_decode(self.native, batch))
        self._threads.begin(batch.n_tokens, is_prefill=is_prefill)
        status = int(self._library.llama_decode(self.native, batch))
        self._threads.end()
        return status

    def _placed(self, run: BatchRows) -> BatchRows:
        positions = self.positions[run.slot]
        if run.vectors is None:
            return run._replace(start=positions.of(run.start))
        vectors, places = split_places(run.vectors)
        return run._replace(
            start=positions.place(run.start, places), vectors=vectors, places=places
        )

    def clear(self) -> None:
        self.memory.clear()
        self.positions.clear()

    def share(self, source: int, into: int, tokens: int) -> None:
        positions = self.positions[source]
        stop = positions.of(tokens)
        self.memory.copy(source, into, 0, stop)
        self.positions[into] = positions.first(tokens)

    def remove(self, slot: int, start: int = 0) -> None:
        """Remove the tokens of a slot from `start` on."""
        positions = self.positions[slot]
        whole = positions.whole(start)
        rest = self.export(slot, whole, start) if whole < start else b""
        if not self.memory.remove(slot, positions.of(whole)):
            raise EngineBroken("llama.cpp refused to truncate a sequence")
        self.positions[slot] = positions.first(whole)
        if rest:  # llama.cpp cuts by position, and all tokens of a picture have the same
            self.restore(slot, whole, start, rest)

    def export(
        self, slot: int, start: int, stop: int, allocate: Allocate = plain_memory
    ) -> memoryview | bytes:
        """Share the range with the scratch slot, read that slot's state, and release it."""
        positions = self.positions[slot]
        first, last = positions.of(start), positions.of(stop - 1)
        self.memory.copy(slot, self.scratch, first, last + 1)
        try:
            if self.shape.recurrent:  # drop the recurrent state, which is as large as many blocks
                self.resume(self.scratch, self._nothing)
            state = self.memory.read(self.scratch, bindings.WHOLE_STATE, allocate)
        finally:
            self.remove(self.scratch)
        state = state[: len(state) - len(self._no_recurrence)]
        whole = positions.whole(start)
        if whole == start and positions.whole(stop) == stop:
            return state
        return cut_cells(state, start - whole, stop - whole)

    def restore(self, slot: int, start: int, stop: int, blob: Blob) -> None:
        """Read the state into the scratch slot, because reading replaces its target, then
        share it."""
        positions = self.positions[slot]
        if self.shape.has_places:
            positions = positions.with_block(start, blob, stop - start)
        first, last = positions.of(start), positions.of(stop - 1)
        if self.shape.recurrent:
            blob = b"".join((blob, self._no_recurrence))
        self.memory.write(self.scratch, blob, bindings.WHOLE_STATE)
        if not self.shape.recurrent and self.memory.span(self.scratch) != (first, last):
            raise EngineBroken("llama.cpp restored a block at other positions")
        self.memory.copy(self.scratch, slot, first, last + 1)
        self.remove(self.scratch)
        self.positions[slot] = positions

    def checkpoint(self, slot: int) -> bytes:
        return bytes(self.memory.read(slot, bindings.PARTIAL_STATE))

    def resume(self, slot: int, checkpoint: Blob) -> None:
        self.memory.write(slot, checkpoint, bindings.PARTIAL_STATE)

    def reaches(self, slot: int, tokens: int) -> bool:
        """Return whether the state of a slot ends after exactly this many tokens."""
        return self.memory.span(slot)[1] == self.positions[slot].of(tokens - 1)

    @property
    def _no_recurrence(self) -> bytes:
        """The end of the state of a slot that has cells but no recurrent state."""
        return self._nothing[bindings.STATE_HEADER_BYTES :]

    def logits(self, indices: Seq[int], vocabulary_size: int) -> Matrix:
        """Return a writable view on the logits of the last call, valid until the next one.

        `indices` are the batch indices of all rows that have logits, in ascending order. llama.cpp
        stores these rows one after the other.
        """
        count = len(indices)
        first = last = self._library.llama_get_logits_ith(self.native, indices[0])
        if count > 1:
            last = self._library.llama_get_logits_ith(self.native, indices[-1])
        if not first or last != first + 4 * (count - 1) * vocabulary_size:  # float32
            raise EngineBroken("llama.cpp returned no logits for a requested row")
        if (first, count) not in self._logits:  # a few views are used again and again
            floats = ctypes.c_float * (count * vocabulary_size)
            rows = memoryview(floats.from_address(first)).cast("B")
            view = np.frombuffer(rows, np.float32).reshape(count, vocabulary_size)
            self._logits[first, count] = view
        return self._logits[first, count]


def _check(status: int) -> None:
    if status == bindings.DECODE_NO_ROOM:
        raise PoolFull("no free cells for this step")
    if status != bindings.DECODE_OK:
        raise EngineBroken(f"llama_decode failed with status {status}")
