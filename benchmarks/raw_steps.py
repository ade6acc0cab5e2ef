"""Measures the limit of any server: llama.cpp's calls in a loop with greedy sampling."""

from __future__ import annotations

import time
from pathlib import Path

from rekindle.engine.base import EngineOptions
from rekindle.engine.llamacpp.batch import BatchRows
from rekindle.engine.llamacpp.context import Context, Shape
from rekindle.engine.llamacpp.model import LlamaModel

PROMPT_TOKENS = 40  # about as long as the prompts of the servers
BATCH_TOKENS = 512


class RawSteps:
    """A model with as many cells and threads as the servers have."""

    def __init__(self, path: Path, *, slots: int, threads: int, context: int) -> None:
        options = EngineOptions(path=path, threads=threads, gpu_layers=0)
        self._model = LlamaModel(options, lambda _done: None)
        self._vocabulary = self._model.tokenizer.size
        shape = Shape(cells=context, sequences=slots, threads=threads, batch=BATCH_TOKENS)
        self._context = Context(self._model.library, self._model.native, shape)

    def tokens_per_s(self, streams: int, tokens: int) -> float:
        """The speed of this many concurrent replies of this many tokens."""
        prompt = list(range(1000, 1000 + PROMPT_TOKENS))
        for slot in range(streams):
            self._context.decode([BatchRows(slot, 0, prompt, True)])
        last = [prompt[-1]] * streams
        started = time.perf_counter()
        for step in range(tokens):
            rows = [
                BatchRows(slot, PROMPT_TOKENS + step, [last[slot]], True) for slot in range(streams)
            ]
            indices = self._context.decode(rows)
            last = self._context.logits(indices, self._vocabulary).argmax(axis=1).tolist()
        took_s = time.perf_counter() - started
        self._context.clear()
        return streams * tokens / took_s

    def close(self) -> None:
        self._context.close()
        self._model.close()
