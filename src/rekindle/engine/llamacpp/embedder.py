"""GGUF models that make vectors, or score pairs of texts."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from rekindle.engine.base import EmbedderInfo, EngineOptions, Matrix, OnProgress
from rekindle.engine.llamacpp import bindings
from rekindle.engine.llamacpp.bert import Bert
from rekindle.engine.llamacpp.bert_file import open_bert
from rekindle.engine.llamacpp.embedding_context import EmbeddingContext
from rekindle.engine.llamacpp.model import LlamaModel
from rekindle.engine.llamacpp.packing import CALL_TOKENS
from rekindle.errors import ModelError

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
