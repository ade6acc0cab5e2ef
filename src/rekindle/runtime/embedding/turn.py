"""One request for vectors or scores: its inputs as tokens, and what has been found of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rekindle.engine.base import Embedder, Matrix
from rekindle.errors import BadRequest, InputTooLong, Unsupported
from rekindle.protocol.embeddings import Embedded, EmbedRequest, Ranked, RankRequest
from rekindle.tokens import pack

LITTLE_ENDIAN = np.dtype("<f4")


@dataclass(frozen=True, slots=True)
class Input:
    """Tokens to compute, and what stands for them."""

    key: bytes
    tokens: list[int]


class EmbeddingTurn:
    """Equal inputs are computed once; the longest is the next, so that those of a call are about
    as long as each other."""

    def __init__(
        self, request: EmbedRequest | RankRequest, inputs: Sequence[list[int]], dimensions: int
    ) -> None:
        """`dimensions`: of a vector that the model makes."""
        self.id = request.turn
        self.request = request
        self._dimensions = dimensions
        self._order = [pack(tokens) for tokens in inputs]
        self.prompt_tokens = sum(map(len, inputs))
        self.computed_tokens = 0
        unique = dict(zip(self._order, inputs, strict=True))
        self._missing = [Input(key, tokens) for key, tokens in unique.items()]
        self._missing.sort(key=lambda each: len(each.tokens))
        self._rows: dict[bytes, Matrix] = {}

    @property
    def missing(self) -> list[Input]:
        """Inputs that are to be computed, the longest last."""
        return self._missing

    @property
    def is_whole(self) -> bool:
        return len(self._rows) == len(set(self._order))

    @property
    def reused_tokens(self) -> int:
        return self.prompt_tokens - self.computed_tokens

    @property
    def at_once(self) -> int | None:
        """How many of its inputs may be computed at once; None: any number."""
        return self.request.batch_size if isinstance(self.request, EmbedRequest) else None

    def know(self, rows: dict[bytes, Matrix]) -> None:
        """Rows that were computed for an earlier request."""
        self._rows |= rows
        self._missing = [each for each in self._missing if each.key not in rows]

    def accept(self, computed: Input, row: Matrix) -> None:
        self._rows[computed.key] = row
        self.computed_tokens += len(computed.tokens)

    def result(self) -> Embedded | Ranked:
        """The answer, once it is whole."""
        rows = np.stack([self._rows[key] for key in self._order])
        counts = (self.prompt_tokens, self.reused_tokens)
        if isinstance(self.request, RankRequest):
            return Ranked(self.id, rows[:, 0].tolist(), *counts)
        dimensions = self.request.dimensions or self._dimensions
        if dimensions < self._dimensions:
            rows = rows[:, :dimensions]
            rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)
        return Embedded(self.id, rows.astype(LITTLE_ENDIAN).tobytes(), dimensions, *counts)


def begin(embedder: Embedder, request: EmbedRequest | RankRequest) -> EmbeddingTurn:
    """A request as tokens. Any thread; raises a BadRequest that names what cannot be taken."""
    info = embedder.info
    if isinstance(request, RankRequest):
        if not info.ranks:
            raise Unsupported("this model makes vectors and cannot rank: serve a reranker for that")
        query = request.query
        pairs = [embedder.pair(query, document) for document in request.documents]
        _check_lengths(pairs, info.context_tokens, "documents")
        return EmbeddingTurn(request, pairs, info.dimensions)
    if info.ranks:
        raise Unsupported("this model ranks documents and makes no vectors: use /v1/rerank")
    if (request.dimensions or 0) > info.dimensions:
        raise BadRequest(
            f"`dimensions` takes up to {info.dimensions}, which is what this model has",
            param="dimensions",
        )
    inputs = [_tokens(embedder, place, each) for place, each in enumerate(request.inputs)]
    _check_lengths(inputs, info.context_tokens, "input")
    return EmbeddingTurn(request, inputs, info.dimensions)


def _tokens(embedder: Embedder, place: int, given: str | list[int]) -> list[int]:
    if isinstance(given, str):
        least = len(given) // embedder.tokenizer.longest_bytes
        if least > embedder.info.context_tokens:  # tokenising takes its time: refuse it before
            raise InputTooLong("input", place, f"at least {least}", embedder.info.context_tokens)
        return embedder.encode(given)
    most = embedder.tokenizer.size - 1
    if not all(0 <= token <= most for token in given):
        raise BadRequest(
            f"`input[{place}]` has token ids of another model: this model's go from 0 to {most}; "
            "send text (LangChain: check_embedding_ctx_length=False)",
            param="input",
        )
    return given


def _check_lengths(inputs: Sequence[list[int]], limit: int, param: str) -> None:
    for place, tokens in enumerate(inputs):
        if not tokens:
            raise BadRequest(f"`{param}[{place}]` has no token: leave it out", param=param)
        if len(tokens) > limit:
            raise InputTooLong(param, place, str(len(tokens)), limit)
