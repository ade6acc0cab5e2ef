"""A llama.cpp context that makes one row of each input, and keeps nothing between two calls."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from rekindle.engine.base import Matrix
from rekindle.engine.llamacpp import bindings
from rekindle.engine.llamacpp.batch import BatchArrays, Rows
from rekindle.engine.llamacpp.model import LlamaModel
from rekindle.engine.llamacpp.packing import CALL_TOKENS, packed
from rekindle.errors import EngineBroken, ModelError

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
