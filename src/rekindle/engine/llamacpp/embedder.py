"""GGUF models that make vectors, or score pairs of texts, through llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

import numpy as np

from rekindle.engine.base import EmbedderInfo, EngineOptions, Matrix, OnProgress
from rekindle.engine.llamacpp import bindings
from rekindle.engine.llamacpp.context import BatchArrays, Rows
from rekindle.engine.llamacpp.model import LlamaModel
from rekindle.errors import EngineBroken, ModelError

SEQUENCES = 64  # inputs of one native call
USUAL_CONTEXT_TOKENS = 8192  # of a model that was trained for more: buffers grow with it
# Rows of one native call, unless one input has more. Attention looks at all of them, whichever
# input they belong to, so more rows cost more than they save.
CALL_TOKENS = 512


class LlamaCppEmbedder:
    """An input lies in one native call whole: a model that is not causal sees all of it at once."""

    def __init__(
        self, options: EngineOptions, on_progress: OnProgress = lambda _done: None
    ) -> None:
        self._model = LlamaModel(options, on_progress)
        self._library = self._model.library
        self.tokenizer = self._model.tokenizer
        self._threads = options.threads
        wanted = options.context_tokens or USUAL_CONTEXT_TOKENS
        context_tokens = min(wanted, self._model.trained_tokens)
        # llama.cpp reserves rows for whole sequences: a rest would make it abort.
        self._rows = -(-max(context_tokens, CALL_TOKENS) // SEQUENCES) * SEQUENCES
        self._batch = BatchArrays(self._rows)
        ranks = self._model.pooling == bindings.POOLING_RANK
        outputs = int(self._library.llama_model_n_cls_out(self._model.native))
        if ranks and outputs != 1:
            raise ModelError(
                f"{options.path.name} sorts texts into {outputs} classes: only models that give "
                "one score, or vectors, are served"
            )
        self.info = EmbedderInfo(
            context_tokens=context_tokens,
            batch_tokens=CALL_TOKENS,
            dimensions=int(self._library.llama_model_n_embd_out(self._model.native)),
            ranks=ranks,
        )
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

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return self.tokenizer.encode(text, special=special, add_special=True)

    def pair(self, query: str, document: str) -> list[int]:
        return self.tokenizer.pair(query, document)

    def embed(self, inputs: Seq[Seq[int]]) -> Matrix:
        vectors = self._pooled(inputs, self.info.dimensions)
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        normalised: Matrix = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
        return normalised

    def rank(self, pairs: Seq[Seq[int]]) -> list[float]:
        scores: list[float] = (1 / (1 + np.exp(-self._pooled(pairs, 1)[:, 0]))).tolist()
        return scores

    def _pooled(self, inputs: Seq[Seq[int]], width: int) -> Matrix:
        """What the model makes of each input, in their order."""
        rows = np.empty((len(inputs), width), np.float32)
        for places in packed([len(tokens) for tokens in inputs], CALL_TOKENS, SEQUENCES):
            self._compute([inputs[place] for place in places])
            for slot, place in enumerate(places):
                pointer = self._library.llama_get_embeddings_seq(self._native, slot)
                rows[place] = np.ctypeslib.as_array(pointer, shape=(width,))
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
            self._library.llama_free(self._native)
            self._native = self._build()
            raise EngineBroken(f"llama.cpp failed to embed, with status {status}")

    def close(self) -> None:
        self._library.llama_free(self._native)
        self._model.close()


def packed(lengths: Seq[int], most_tokens: int, most_inputs: int) -> Iterator[list[int]]:
    """Places of inputs that are computed together, the longest first: those of one call take about
    the same time, and what is left for the last call is short."""
    places: list[int] = []
    tokens = 0
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        if places and (tokens + lengths[place] > most_tokens or len(places) == most_inputs):
            yield places
            places, tokens = [], 0
        places.append(place)
        tokens += lengths[place]
    if places:
        yield places
