"""Computes embeddings and rerank scores with GGUF models."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from rekindle.engine.base import EmbedderInfo, EngineOptions, Matrix, OnProgress
from rekindle.engine.llamacpp import bindings
from rekindle.engine.llamacpp.batch import BatchArrays, BatchRows
from rekindle.engine.llamacpp.bert import CALL_TOKENS, Bert, open_bert, packed
from rekindle.engine.llamacpp.model import LlamaModel
from rekindle.engine.llamacpp.step_threads import OtherPrograms, StepThreads
from rekindle.engine.rerank import QWEN3_PROMPT, RerankPrompt
from rekindle.errors import EngineBroken, ModelError

SEQUENCES = 64  # inputs of one native call


class EmbeddingContext:
    """A llama.cpp context that makes one row per input, and keeps nothing between calls.

    An input is never split, because a model that is not causal sees all of it. Attention visits all
    rows of a native call, whichever input they belong to, so larger calls cost more than they save.
    """

    def __init__(self, model: LlamaModel, *, width: int, context_tokens: int, threads: int) -> None:
        """`width` is that of an output row."""
        self._model = model
        self._library = model.library
        self._width = width
        self._threads = threads
        # A multiple of the sequences: llama.cpp aborts otherwise.
        self._rows = -(-max(context_tokens, CALL_TOKENS) // SEQUENCES) * SEQUENCES
        self._batch = BatchArrays(self._rows)
        self._native = self._build()

    def _build(self) -> int:
        params = self._library.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = self._rows
        params.n_outputs_max = params.n_outputs_max_per_seq = self._rows
        params.n_seq_max = SEQUENCES
        params.n_threads = params.n_threads_batch = self._threads
        params.flash_attn_type = bindings.FLASH_ATTENTION_ENABLED
        params.kv_unified = True
        params.embeddings = True
        params.pooling_type = self._model.pooling
        native = self._library.llama_init_from_model(self._model.native, params)
        if not native:
            raise ModelError(
                f"llama.cpp could not build a context of {self._rows} tokens; lower --max-model-len"
            )
        self._memory = self._library.llama_get_memory(native)  # None if the model is not causal
        set_threads = self._library.llama_set_n_threads
        self._step_threads = StepThreads(
            self._threads, lambda n: set_threads(native, n, n), OtherPrograms().idle_cores
        )
        return int(native)

    def pooled(self, inputs: Seq[Seq[int]]) -> Matrix:
        rows = np.empty((len(inputs), self._width), np.float32)
        for places in packed([len(tokens) for tokens in inputs], CALL_TOKENS, SEQUENCES):
            self._compute([inputs[place] for place in places])
            for slot, place in enumerate(places):
                pointer = self._library.llama_get_embeddings_seq(self._native, slot)
                rows[place] = np.ctypeslib.as_array(pointer, shape=(self._width,))
        return rows

    def _compute(self, inputs: Seq[Seq[int]]) -> None:
        rows = [BatchRows(slot, 0, tokens, True) for slot, tokens in enumerate(inputs)]
        batch, _ = self._batch.fill(rows, all_wanted=True)
        self._step_threads.begin(batch.n_tokens, is_prefill=True)
        if self._memory:
            self._library.llama_memory_clear(self._memory, False)
            status = self._library.llama_decode(self._native, batch)
        else:
            status = self._library.llama_encode(self._native, batch)
        self._step_threads.end()
        if status != bindings.DECODE_OK:
            self.close()
            self._native = self._build()
            raise EngineBroken(f"llama.cpp failed to embed with status {status}")

    def close(self) -> None:
        self._library.llama_free(self._native)


class Score(NamedTuple):
    """Which output of a classifier is the score of a pair."""

    output: int
    is_probability: bool  # otherwise any number, larger for a better document


def score_of(model: LlamaModel, name: str) -> Score:
    """Find the score of a reranker; raises ModelError. llama.cpp applies a softmax to the outputs
    of a Qwen3, so they have to be the two answers."""
    if model.architecture in ("qwen3", "qwen3vl"):
        if sorted(model.labels) != ["no", "yes"]:
            raise ModelError(
                f"{name} is a Qwen3 for ranking without the outputs yes and no, so every score "
                "would be wrong: give a file that a newer convert_hf_to_gguf.py wrote from "
                "Qwen3-Reranker"
            )
        return Score(model.labels.index("yes"), is_probability=True)
    if len(model.labels) != 1:
        raise ModelError(
            f"{name} sorts texts into {len(model.labels)} classes: only models with one score or "
            "with embeddings are supported"
        )
    return Score(0, is_probability=False)


class LlamaCppEmbedder:
    """Loads and tokenizes with llama.cpp. NumPy computes where it is faster (see `bert.py`)."""

    def __init__(
        self, options: EngineOptions, on_progress: OnProgress = lambda _done: None
    ) -> None:
        self._model = LlamaModel(options, on_progress)
        self.tokenizer = self._model.tokenizer
        wanted = options.context_tokens or 8192  # not more by default: buffers grow with it
        self.info = EmbedderInfo(
            context_tokens=min(wanted, self._model.trained_tokens),
            batch_tokens=CALL_TOKENS * max(options.threads, 4),  # several calls, sorted by length
            dimensions=int(self._model.library.llama_model_n_embd_out(self._model.native)),
            ranks=self._model.pooling == bindings.POOLING_RANK,
        )
        self._score = score_of(self._model, options.path.name) if self.info.ranks else None
        prompt = self._model.rerank_prompt
        if self._score is not None and self._score.is_probability:
            prompt = prompt or QWEN3_PROMPT
        has_prompt = self._score is not None and prompt is not None
        self._prompt = RerankPrompt(self.tokenizer, prompt or "") if has_prompt else None
        self._computes = self._open(options)

    def _open(self, options: EngineOptions) -> Bert | EmbeddingContext:
        width = len(self._model.labels) if self.info.ranks else self.info.dimensions
        return open_bert(self._model, options.path, options.threads) or EmbeddingContext(
            self._model,
            width=width,
            context_tokens=self.info.context_tokens,
            threads=options.threads,
        )

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return self.tokenizer.encode(text, special=special, add_special=True)

    def pair(self, query: str, document: str) -> list[int]:
        if self._prompt is not None:
            return self._prompt.encode(query, document)
        return self.tokenizer.pair(query, document)

    def embed(self, inputs: Seq[Seq[int]]) -> Matrix:
        vectors = self._computes.pooled(inputs)
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        normalised: Matrix = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
        return normalised

    def rank(self, pairs: Seq[Seq[int]]) -> list[float]:
        assert self._score is not None
        outputs = self._computes.pooled(pairs)[:, self._score.output]
        scores = outputs if self._score.is_probability else 1 / (1 + np.exp(-outputs))
        listed: list[float] = scores.tolist()
        return listed

    def close(self) -> None:
        self._computes.close()
        self._model.close()
