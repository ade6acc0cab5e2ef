"""Holds one request for embeddings or scores: its tokenised inputs and the rows found so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rekindle.engine.base import Embedder, Matrix
from rekindle.errors import BadRequest, InputTooLong, Unsupported
from rekindle.protocol.events import Embedded, Ranked
from rekindle.protocol.requests import EmbedRequest, RankRequest
from rekindle.tokens import pack


@dataclass(frozen=True, slots=True)
class Input:
    """The tokens of one text, and the key of its row in the cache."""

    key: bytes
    tokens: list[int]


class EmbeddingTurn:
    """A request on its way. Equal inputs are computed once."""

    def __init__(
        self,
        request: EmbedRequest | RankRequest,
        inputs: Sequence[list[int]],
        dimensions: int,
        *,
        normalises: bool = True,
    ) -> None:
        """`dimensions` is the width of the model's vectors, and `normalises` their length one."""
        self.id = request.turn
        self.request = request
        self._dimensions = dimensions
        self._normalises = normalises
        self._order = [pack(tokens) for tokens in inputs]
        self.prompt_tokens = sum(map(len, inputs))
        self.computed_tokens = 0
        unique = dict(zip(self._order, inputs, strict=True))
        # Inputs left to compute, taken from the end. Sorting by length keeps the inputs of one
        # engine call about equally long.
        self.missing = [Input(key, tokens) for key, tokens in unique.items()]
        self.missing.sort(key=lambda each: len(each.tokens))
        self._rows: dict[bytes, Matrix] = {}

    @property
    def is_complete(self) -> bool:
        return len(self._rows) == len(set(self._order))

    @property
    def reused_tokens(self) -> int:
        return self.prompt_tokens - self.computed_tokens

    @property
    def batch_size(self) -> int | None:
        """The most inputs to compute in one engine call, or None for no limit."""
        return self.request.batch_size if isinstance(self.request, EmbedRequest) else None

    def reuse(self, rows: dict[bytes, Matrix]) -> None:
        """Take rows that were computed for an earlier request."""
        self._rows |= rows
        self.missing = [each for each in self.missing if each.key not in rows]

    def accept(self, computed: Input, row: Matrix) -> None:
        self._rows[computed.key] = row
        self.computed_tokens += len(computed.tokens)

    def result(self) -> Embedded | Ranked:
        rows = np.stack([self._rows[key] for key in self._order])
        counts = (self.prompt_tokens, self.reused_tokens)
        if isinstance(self.request, RankRequest):
            return Ranked(self.id, rows[:, 0].tolist(), *counts)
        dimensions = self.request.dimensions or self._dimensions
        rows = rows[:, :dimensions]
        if dimensions < self._dimensions and self._normalises:  # Matryoshka: normalise again
            rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)
        return Embedded(self.id, rows.astype("<f4").tobytes(), dimensions, *counts)


def encode_inputs(embedder: Embedder, request: EmbedRequest | RankRequest) -> EmbeddingTurn:
    """Tokenise a request, on any thread. Raises a BadRequest that names the invalid field."""
    info = embedder.info
    if isinstance(request, RankRequest):
        if not info.ranks:
            raise Unsupported("this model makes vectors and cannot rank: serve a reranker for that")
        pairs = [embedder.pair(request.query, document) for document in request.documents]
        _check_lengths(pairs, info.context_tokens, "documents")
        return EmbeddingTurn(request, pairs, info.dimensions)
    if info.ranks:
        raise Unsupported("this model ranks documents and makes no vectors: use /v1/rerank")
    if (request.dimensions or 0) > info.dimensions:
        raise BadRequest(
            f"`dimensions` may be at most {info.dimensions}, the width of this model's vectors",
            param="dimensions",
        )
    inputs = [
        _shortened(embedder, each)
        if request.truncate and isinstance(each, str)
        else _tokens(embedder, place, each)
        for place, each in enumerate(request.inputs)
    ]
    _check_lengths(inputs, info.context_tokens, "input")
    return EmbeddingTurn(request, inputs, info.dimensions, normalises=info.normalises)


def _shortened(embedder: Embedder, text: str) -> list[int]:
    """Truncate a text to the model's context. The last token, a special one, is kept."""
    tokens, limit = embedder.encode(text), embedder.info.context_tokens
    return tokens if len(tokens) <= limit else [*tokens[: limit - 1], tokens[-1]]


def _tokens(embedder: Embedder, place: int, given: str | list[int | str]) -> list[int]:
    texts = [given] if isinstance(given, str) else [each for each in given if isinstance(each, str)]
    min_tokens = sum(map(len, texts)) // embedder.tokenizer.longest_bytes
    if min_tokens > embedder.info.context_tokens:  # refuse it before the slow tokenising
        raise InputTooLong("input", place, f"at least {min_tokens}", embedder.info.context_tokens)
    if isinstance(given, str):
        return embedder.encode(given)
    last = embedder.tokenizer.size - 1
    if not all(0 <= token <= last for token in given if isinstance(token, int)):
        raise BadRequest(
            f"`input[{place}]` has token ids of another model: this model's go from 0 to {last}; "
            "send text (LangChain: check_embedding_ctx_length=False)",
            param="input",
        )
    tokens: list[int] = []
    for each in given:
        tokens += (
            [each] if isinstance(each, int) else embedder.tokenizer.encode(each, special=False)
        )
    return tokens


def _check_lengths(inputs: Sequence[list[int]], limit: int, param: str) -> None:
    for place, tokens in enumerate(inputs):
        if not tokens:
            raise BadRequest(f"`{param}[{place}]` has no tokens: leave it out", param=param)
        if len(tokens) > limit:
            raise InputTooLong(param, place, str(len(tokens)), limit)
