"""GGUF models that make vectors, or score pairs of texts."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from rekindle.engine.base import EmbedderInfo, EngineOptions, Matrix, OnProgress
from rekindle.engine.llamacpp import bindings
from rekindle.engine.llamacpp.batch import BatchArrays, Rows
from rekindle.engine.llamacpp.bert import CALL_TOKENS, Bert, open_bert, packed
from rekindle.engine.llamacpp.model import LlamaModel
from rekindle.errors import EngineBroken, ModelError

# ----------------------------------------------------------------------
# A llama.cpp context that makes one row of each input, and keeps nothing between two calls.

SEQUENCES = 64  # inputs of one native call


class EmbeddingContext:
    """An input lies in one native call whole: a model that is not causal sees all of it at once.
    Attention looks at all rows of a call, whichever input they belong to, so larger calls cost
    more than they save."""

    def __init__(self, model: LlamaModel, *, width: int, context_tokens: int, threads: int) -> None:
        """`width`: of a row that it makes."""
        self._model = model
        self._library = model.library
        self._width = width
        self._threads = threads
        # llama.cpp reserves rows for whole sequences: a rest would make it abort.
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
        self._memory = self._library.llama_get_memory(native)  # none where nothing is causal
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
        rows = [Rows(slot, 0, tokens, True) for slot, tokens in enumerate(inputs)]
        batch, _ = self._batch.fill(rows, all_wanted=True)
        if self._memory:
            self._library.llama_memory_clear(self._memory, False)
            status = self._library.llama_decode(self._native, batch)
        else:
            status = self._library.llama_encode(self._native, batch)
        if status != bindings.DECODE_OK:
            self.close()
            self._native = self._build()
            raise EngineBroken(f"llama.cpp failed to embed, with status {status}")

    def close(self) -> None:
        self._library.llama_free(self._native)


USUAL_CONTEXT_TOKENS = 8192  # of a model that was trained for more: buffers grow with it
LEAST_CALLS = 4  # of which a batch is made: fewer could not be sorted by length


class LlamaCppEmbedder:
    """llama.cpp reads the file and cuts the texts; it also computes, except where NumPy is
    faster."""

    def __init__(
        self, options: EngineOptions, on_progress: OnProgress = lambda _done: None
    ) -> None:
        self._model = LlamaModel(options, on_progress)
        self.tokenizer = self._model.tokenizer
        wanted = options.context_tokens or USUAL_CONTEXT_TOKENS
        self.info = EmbedderInfo(
            context_tokens=min(wanted, self._model.trained_tokens),
            batch_tokens=CALL_TOKENS * max(options.threads, LEAST_CALLS),
            dimensions=int(self._model.library.llama_model_n_embd_out(self._model.native)),
            ranks=self._model.pooling == bindings.POOLING_RANK,
        )
        self._computes = self._open(options)

    def _open(self, options: EngineOptions) -> Bert | EmbeddingContext:
        width = self.info.dimensions
        if self.info.ranks:
            width = int(self._model.library.llama_model_n_cls_out(self._model.native))
            if width != 1:
                raise ModelError(
                    f"{options.path.name} sorts texts into {width} classes: only models that give "
                    "one score, or vectors, are served"
                )
        return open_bert(self._model, options.path, options.threads) or EmbeddingContext(
            self._model,
            width=width,
            context_tokens=self.info.context_tokens,
            threads=options.threads,
        )

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return self.tokenizer.encode(text, special=special, add_special=True)

    def pair(self, query: str, document: str) -> list[int]:
        return self.tokenizer.pair(query, document)

    def embed(self, inputs: Seq[Seq[int]]) -> Matrix:
        vectors = self._computes.pooled(inputs)
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        normalised: Matrix = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
        return normalised

    def rank(self, pairs: Seq[Seq[int]]) -> list[float]:
        scores: list[float] = (1 / (1 + np.exp(-self._computes.pooled(pairs)[:, 0]))).tolist()
        return scores

    def close(self) -> None:
        self._computes.close()
        self._model.close()
