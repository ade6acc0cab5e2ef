"""Measures the limit of every server: llama.cpp's own calls through our bindings.

It prints figures as lines of JSON, with the names of the servers' cases.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from cases import SMALL, Figures, Sizes

from rekindle.engine.llamacpp import bindings
from rekindle.engine.llamacpp.batch import BatchArrays, BatchRows

STEP_TOKENS = 2048
PROMPT_TOKENS = 100
FIRST_STEPS = 40  # that are nearly a hundred tokens long
WARM_UP_STEPS = 5
SPARE = 64


class Caller:
    """A model and its contexts, one after the other."""

    def __init__(self, path: Path, threads: int) -> None:
        self.library: Any = bindings.load_library()
        self._threads = threads
        params = self.library.llama_model_default_params()
        params.n_gpu_layers = 999 if self.library.llama_supports_gpu_offload() else 0
        self._model = self.library.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        self.vocabulary = self.library.llama_vocab_n_tokens(
            self.library.llama_model_get_vocab(self._model)
        )

    @contextmanager
    def context(self, cells: int, sequences: int, unified: bool = True) -> Iterator[_Context]:
        params = self.library.llama_context_default_params()
        params.n_ctx = cells
        params.n_batch = params.n_ubatch = STEP_TOKENS
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = self._threads
        params.flash_attn_type = bindings.FLASH_ATTENTION_ENABLED
        params.kv_unified = unified
        native = self.library.llama_init_from_model(self._model, params)
        if not native:
            raise RuntimeError(f"no context of {cells} cells")
        try:
            yield _Context(self.library, native, self.vocabulary)
        finally:
            self.library.llama_free(native)


class _Context:
    def __init__(self, library: Any, native: int, vocabulary: int) -> None:
        self._library, self._native, self._vocabulary = library, native, vocabulary
        self._memory = library.llama_get_memory(native)
        self._arrays = BatchArrays(STEP_TOKENS)

    def call(self, rows: Sequence[BatchRows]) -> list[Any]:
        """The requested logits. Reading the first of them waits for the device."""
        batch, last = self._arrays.fill(rows)
        if status := self._library.llama_decode(self._native, batch):
            raise RuntimeError(f"llama_decode failed with status {status}")
        return [
            self._library.llama_get_logits_ith(self._native, index)
            for index, run in zip(last, rows, strict=True)
            if run.wanted
        ]

    def prefill(self, slot: int, tokens: Sequence[int], start: int = 0) -> None:
        for at in range(0, len(tokens), STEP_TOKENS):
            part = tokens[at : at + STEP_TOKENS]
            self.call([BatchRows(slot, start + at, part, at + len(part) == len(tokens))])

    def forget(self, slot: int, start: int = 0) -> None:
        self._library.llama_memory_seq_rm(self._memory, slot, start, -1)

    def argmax(self, pointers: list[Any]) -> None:
        for pointer in pointers:
            row = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float))
            np.ctypeslib.as_array(row, (self._vocabulary,)).argmax()


def _timed_ms(action: Any) -> float:
    started = time.perf_counter()
    action()
    return (time.perf_counter() - started) * 1000


def _tokens(count: int, seed: int, vocabulary: int) -> list[int]:
    chance = np.random.default_rng(seed)
    return [int(each) for each in chance.integers(1000, vocabulary - 1000, count)]


def steps(caller: Caller, sizes: Sizes) -> Iterator[Figures]:
    """Measure steps of this many rows, with the lengths of the servers' prompts and replies: in one
    pool, as in both servers, and with separate cells per row."""
    for count in sizes.streams:
        taken, greedy = _replies(caller, count, sizes.stream_tokens, unified=True)
        step_ms = fmean(taken)  # some steps build a new CUDA graph
        yield {
            f"streams-{count}.step ms": step_ms,
            f"streams-{count}.median step ms": median(taken),
            f"streams-{count}.step and argmax ms": fmean(greedy),
            f"streams-{count}.greedy tokens/s": count * 1000 / step_ms,
            f"streams-{count}.sampled tokens/s": count * 1000 / step_ms,
            f"streams-{count}.first steps tokens/s": count * 1000 / fmean(taken[:FIRST_STEPS]),
        }
        apart, _ = _replies(caller, count, sizes.stream_tokens, unified=False)
        yield {f"streams-{count}.apart tokens/s": count * 1000 / fmean(apart)}
        if count == 1:
            for state in ("empty", "kept"):
                yield {f"decode-1.{state} tokens/s": 1000 / step_ms}


def _replies(
    caller: Caller, count: int, tokens: int, *, unified: bool
) -> tuple[list[float], list[float]]:
    """The time of each step, without and with sampling."""
    cells = count * (PROMPT_TOKENS + tokens + SPARE) + 256
    taken, greedy = [], []
    with caller.context(
        cells if unified else count * max(cells // count, 512), count, unified
    ) as context:
        for slot in range(count):
            context.prefill(slot, _tokens(PROMPT_TOKENS, slot, caller.vocabulary))
        for step in range(tokens):
            rows = [BatchRows(slot, PROMPT_TOKENS + step, [1000], True) for slot in range(count)]
            logits: list[Any] = []
            taken.append(_timed_ms(lambda: logits.extend(context.call(rows))))  # noqa: B023
            greedy.append(taken[-1] + _timed_ms(lambda: context.argmax(logits)))  # noqa: B023
    return taken[WARM_UP_STEPS:], greedy[WARM_UP_STEPS:]


def cold(caller: Caller, sizes: Sizes) -> Iterator[Figures]:
    """Long prompts on an empty pool, and a few tokens after them."""
    lengths = {"4k": sizes.short, "16k": sizes.middle, "32k": sizes.long}
    with caller.context(sizes.long_context, 1) as context:
        context.prefill(0, _tokens(600, 1, caller.vocabulary))
        for label, length in lengths.items():
            taken, warm = [], []
            for seed in range(3):
                context.forget(0)
                tokens = _tokens(length + SPARE, seed, caller.vocabulary)
                taken.append(_timed_ms(lambda: context.prefill(0, tokens[:length])))  # noqa: B023
                for at in range(3):
                    start = length + 14 * at
                    added = tokens[start : start + 14]
                    warm.append(_timed_ms(lambda: context.prefill(0, added, start)))  # noqa: B023
            yield {
                f"cold-{label}.{state} ms": median(taken) for state in ("empty", "kept", "alone")
            }
            yield {f"turn2-{label}.device ms": median(warm[1:])}


def main() -> None:
    path, threads, small = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "small"
    caller, sizes = Caller(path, threads), SMALL if small else Sizes()
    for part in (steps, cold):
        try:
            for figures in part(caller, sizes):
                print(json.dumps(figures), flush=True)
        except Exception as error:  # measure the rest anyway
            print(json.dumps({"failed": f"{part.__name__}: {error}"}), flush=True)


if __name__ == "__main__":
    main()
