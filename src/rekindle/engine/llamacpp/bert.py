"""BERT's layers on a CPU, with NumPy: its matrix products use whatever the CPU has, where the
library's kernels end at AVX2.

Inputs are computed side by side, a thread for each run of about as many rows as fit in a core's
cache. No row is padding: products take all rows of a run together, attention those of one length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from threadpoolctl import threadpool_limits

from rekindle.engine.base import Matrix
from rekindle.engine.llamacpp.packing import CALL_TOKENS, packed

LEAST_RUN_TOKENS = 96  # fewer rows do not pay for reading all weights
TANH_SCALE = np.float32((2 / np.pi) ** 0.5)
TANH_CUBE = np.float32(0.044715) * TANH_SCALE

Tensors = Mapping[str, Matrix]
Product = Callable[[Matrix, Matrix], Matrix]  # of rows and weights


@dataclass(frozen=True, slots=True)
class Linear:
    weight: Matrix  # a column for each output
    bias: Matrix

    @classmethod
    def of(cls, tensors: Tensors, name: str, scale: float = 1.0) -> Linear:
        factor = np.float32(scale)
        weight = np.ascontiguousarray(tensors[f"{name}.weight"].T) * factor
        return cls(weight, tensors[f"{name}.bias"] * factor)

    def __call__(self, rows: Matrix, product: Product) -> Matrix:
        outputs = product(rows, self.weight)
        outputs += self.bias
        return outputs


@dataclass(frozen=True, slots=True)
class Norm:
    weight: Matrix
    bias: Matrix
    epsilon: np.float32

    @classmethod
    def of(cls, tensors: Tensors, name: str, epsilon: float) -> Norm:
        return cls(tensors[f"{name}.weight"], tensors[f"{name}.bias"], np.float32(epsilon))

    def __call__(self, rows: Matrix) -> Matrix:
        """In place."""
        rows -= rows.mean(axis=1, keepdims=True)
        variance = np.einsum("ij,ij->i", rows, rows)[:, None] / np.float32(rows.shape[1])
        rows *= 1 / np.sqrt(variance + self.epsilon)
        rows *= self.weight
        rows += self.bias
        return rows


@dataclass(frozen=True, slots=True)
class Layer:
    attention_input: Linear  # queries, keys and values
    attention_output: Linear
    attention_norm: Norm
    up: Linear
    down: Linear
    norm: Norm


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive rows of inputs that are equally long."""

    start: int
    inputs: int
    tokens: int  # of each

    @property
    def stop(self) -> int:
        return self.start + self.inputs * self.tokens


class Bert:
    def __init__(
        self,
        tensors: Tensors,
        *,
        layers: int,
        heads: int,
        epsilon: float,
        pool: Callable[[Matrix], Matrix],
        threads: int,
    ) -> None:
        """`pool` makes one row of all the rows of an input."""
        self._heads = heads
        self._pool = pool
        self._thread_count = threads
        self._tokens = tensors["token_embd.weight"]
        self._positions = tensors["position_embd.weight"] + tensors["token_types.weight"][0]
        self._norm = Norm.of(tensors, "token_embd_norm", epsilon)
        self._layers = [self._layer(tensors, f"blk.{n}.", epsilon) for n in range(layers)]
        self._threads = ThreadPoolExecutor(threads, "bert")
        # For good. BLAS threads of its own wait busily for each other: as soon as another process
        # wants a core, as the chat model's does, they are slower than one.
        threadpool_limits(1, "blas")

    def _layer(self, tensors: Tensors, block: str, epsilon: float) -> Layer:
        width = self._tokens.shape[1] // self._heads
        query, key, value = (
            Linear.of(tensors, f"{block}attn_{name}", scale)
            for name, scale in (("q", width**-0.5), ("k", 1.0), ("v", 1.0))
        )
        three = (query, key, value)
        down = Linear.of(tensors, f"{block}ffn_down")
        return Layer(
            Linear(
                np.concatenate([each.weight for each in three], axis=1),
                np.concatenate([each.bias for each in three]),
            ),
            Linear.of(tensors, f"{block}attn_output"),
            Norm.of(tensors, f"{block}attn_output_norm", epsilon),
            Linear.of(tensors, f"{block}ffn_up"),
            Linear(down.weight * np.float32(0.5), down.bias),  # see _gelu
            Norm.of(tensors, f"{block}layer_output_norm", epsilon),
        )

    def pooled(self, inputs: Seq[Seq[int]]) -> Matrix:
        """One row of each input, in their order."""
        lengths = [len(tokens) for tokens in inputs]
        share = max(-(-sum(lengths) // self._thread_count), LEAST_RUN_TOKENS)
        runs = list(packed(lengths, min(share, CALL_TOKENS), len(lengths)))
        found = self._computed([[inputs[place] for place in run] for run in runs])
        rows = np.empty((len(inputs), self._tokens.shape[1]), np.float32)
        for run, made in zip(runs, found, strict=True):
            rows[run] = made
        return rows

    def _computed(self, runs: list[list[Seq[int]]]) -> Iterable[Matrix]:
        """Each run in a thread; a lone one has them all for its products."""
        if len(runs) > 1 or self._thread_count == 1:
            return self._threads.map(self._run, runs)
        return [self._run(run, self._product_by_columns) for run in runs]

    def _product_by_columns(self, rows: Matrix, weight: Matrix) -> Matrix:
        product = np.empty((len(rows), weight.shape[1]), np.float32)
        width = -(-weight.shape[1] // self._thread_count)

        def compute(start: int) -> None:
            stop = start + width
            np.matmul(rows, weight[:, start:stop], out=product[:, start:stop])

        list(self._threads.map(compute, range(0, weight.shape[1], width)))
        return product

    def _run(self, inputs: Seq[Seq[int]], product: Product = np.matmul) -> Matrix:
        """The inputs are in order of their lengths."""
        spans = _spans(inputs)
        rows = self._tokens[np.concatenate([np.asarray(tokens) for tokens in inputs])]
        for span in spans:
            part = rows[span.start : span.stop].reshape(span.inputs, span.tokens, -1)
            part += self._positions[: span.tokens]
        rows = self._norm(rows)
        for layer in self._layers:
            seen = self._attend(layer.attention_input(rows, product), spans)
            attended = layer.attention_output(seen, product)
            attended += rows
            rows = layer.attention_norm(attended)
            outer = layer.down(_gelu(layer.up(rows, product)), product)
            outer += rows
            rows = layer.norm(outer)
        parts = (rows[span.start : span.stop] for span in spans)
        shaped = zip(parts, spans, strict=True)
        return np.concatenate(
            [self._pool(part.reshape(span.inputs, span.tokens, -1)) for part, span in shaped]
        )

    def _attend(self, projected: Matrix, spans: list[Span]) -> Matrix:
        """What each row sees, by its query, of the values in its own input."""
        seen = np.empty((len(projected), projected.shape[1] // 3), np.float32)
        for span in spans:
            part = projected[span.start : span.stop]
            shape = (span.inputs, span.tokens, 3, self._heads, -1)
            query, key, value = part.reshape(shape).transpose(2, 0, 3, 1, 4)
            scores = query @ key.swapaxes(-1, -2)
            scores -= scores.max(axis=-1, keepdims=True)
            np.exp(scores, out=scores)
            scores /= scores.sum(axis=-1, keepdims=True)
            into = seen[span.start : span.stop].reshape(span.inputs, span.tokens, self._heads, -1)
            into[...] = (scores @ value).transpose(0, 2, 1, 3)
        return seen

    def close(self) -> None:
        self._threads.shutdown()


def _gelu(values: Matrix) -> Matrix:
    """Twice its usual approximation with a hyperbolic tangent: halving is in the next weights."""
    inner = values * values
    inner *= TANH_CUBE
    inner += TANH_SCALE
    inner *= values
    np.tanh(inner, out=inner)
    inner += 1
    inner *= values
    return inner


def _spans(inputs: Seq[Seq[int]]) -> list[Span]:
    spans: list[Span] = []
    for tokens, group in groupby(map(len, inputs)):
        start = spans[-1].stop if spans else 0
        spans.append(Span(start, sum(1 for _ in group), tokens))
    return spans
