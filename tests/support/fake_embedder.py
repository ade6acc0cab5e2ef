"""An embedder without a model. Numbers are tokens, and vectors come from a seed."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from rekindle.engine.base import EmbedderInfo, Matrix
from rekindle.errors import EngineBroken
from tests.support.fake import NumberTokenizer

DIMENSIONS = 8


class FakeEmbedder:
    """Records the inputs of every call. A call with the token `breaks_on` fails."""

    def __init__(
        self,
        *,
        context_tokens: int = 16,
        batch_tokens: int = 32,
        ranks: bool = False,
        normalises: bool = True,
    ) -> None:
        self.info = EmbedderInfo(
            context_tokens=context_tokens,
            batch_tokens=batch_tokens,
            dimensions=DIMENSIONS,
            ranks=ranks,
            normalises=normalises,
        )
        self.tokenizer = NumberTokenizer()
        self.calls: list[list[list[int]]] = []
        self.breaks_on: int | None = None

    def embed(self, inputs: Seq[Seq[int]]) -> Matrix:
        self.calls.append([list(tokens) for tokens in inputs])
        if any(self.breaks_on in tokens for tokens in inputs):
            raise EngineBroken("it broke")
        return np.stack([vector_of(tokens) for tokens in inputs])

    def rank(self, pairs: Seq[Seq[int]]) -> list[float]:
        self.calls.append([list(tokens) for tokens in pairs])
        return [tokens[-1] / 100 for tokens in pairs]

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return self.tokenizer.encode(text, special=special)

    def pair(self, query: str, document: str) -> list[int]:
        return [*self.encode(query), *self.encode(document)]

    def close(self) -> None:
        pass


def vector_of(tokens: Seq[int]) -> Matrix:
    vector = np.random.default_rng(list(tokens)).standard_normal(DIMENSIONS).astype(np.float32)
    normalised: Matrix = vector / np.linalg.norm(vector)
    return normalised
