"""One layer of a BERT, in steps that several threads can share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from rekindle.engine.base import Matrix
from rekindle.engine.llamacpp.linear import Linear, Tensors, Weights
from rekindle.engine.team import LEAST_WORK, Share, alone

LEAST_SHARED_ROWS = 48  # of fewer only products are shared: the rest would wait for Python's lock
SAFE_SCORE = 60  # up to here exponentials and their sums are ordinary numbers
# gelu(x) = x (1 + tanh(a x + b x^3)) / 2. The inputs come scaled by the cube root of b, so that
# the inner part is x^3 + GELU_LINEAR x; the weights before and after see to it.
TANH_LINEAR = (2 / np.pi) ** 0.5
GELU_SCALE = (0.044715 * TANH_LINEAR) ** (1 / 3)
GELU_LINEAR = np.float32(TANH_LINEAR / GELU_SCALE)

Stage = Callable[[slice, Share], None]  # of some shards


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive rows of inputs that are equally long."""

    start: int
    inputs: int
    tokens: int  # of each

    @property
    def stop(self) -> int:
        return self.start + self.inputs * self.tokens

    def of(self, rows: Matrix) -> Matrix:
        """These rows, by input and token."""
        shape = (*rows.shape[:-2], self.inputs, self.tokens, rows.shape[-1])
        return rows[..., self.start : self.stop, :].reshape(shape)


@dataclass(frozen=True, slots=True)
class Norm:
    weight: Matrix
    bias: Matrix
    average: Matrix  # multiplied by a row: the mean of its values
    epsilon: np.float32

    @classmethod
    def of(cls, tensors: Tensors, name: str, epsilon: float) -> Norm:
        weight = tensors[f"{name}.weight"]
        average = np.full_like(weight, 1 / len(weight))
        return cls(weight, tensors[f"{name}.bias"], average, np.float32(epsilon))

    def __call__(self, rows: Matrix) -> Matrix:
        """In place."""
        width = np.float32(rows.shape[1])
        rows -= (rows @ self.average)[:, None]
        variance = np.vecdot(rows, rows) / width
        variance += self.epsilon
        rows /= np.sqrt(variance)[:, None]
        rows *= self.weight
        rows += self.bias
        return rows


@dataclass(frozen=True, slots=True)
class Layer:
    """Its weights are in shards, some heads and some inner columns each, that one thread can
    compute alone."""

    shards: int
    heads: int  # of a shard
    attention_input: Linear  # queries, keys and values
    attention_output: Linear  # in one shard
    attention_norm: Norm
    up: Linear
    down: Linear
    bias: Matrix
    norm: Norm

    @classmethod
    def of(cls, tensors: Tensors, weights: Weights, *, heads: int, epsilon: float) -> Layer:
        width, shards = len(tensors["attn_q.bias"]), weights.shards
        one = np.float32(1)
        scales = {"attn_q": np.float32((width // heads) ** -0.5), "attn_k": one, "attn_v": one}
        weight, bias = (
            np.stack(
                [
                    (tensors[f"{name}.{part}"] * scale).reshape(shards, width // shards, -1)
                    for name, scale in scales.items()
                ],
                axis=1,
            )
            for part in ("weight", "bias")
        )
        up, down = tensors["ffn_up.weight"], tensors["ffn_down.weight"]
        scale = np.float32(GELU_SCALE)
        return cls(
            shards,
            heads // shards,
            weights.by_outputs(weight.reshape(-1, width), bias),
            weights.whole(tensors["attn_output.weight"], tensors["attn_output.bias"]),
            Norm.of(tensors, "attn_output_norm", epsilon),
            weights.by_outputs(up * scale, tensors["ffn_up.bias"] * scale),
            weights.by_inputs(down / (2 * scale)),
            tensors["ffn_down.bias"],
            Norm.of(tensors, "layer_output_norm", epsilon),
        )

    def __call__(self, rows: Matrix, spans: list[Span], share: Share) -> Matrix:
        attended = self._attention(rows, spans, share)
        attended += rows
        rows = self.attention_norm(attended)
        outer = self._feed_forward(rows, share)
        outer += self.bias
        outer += rows
        return self.norm(outer)

    def _attention(self, rows: Matrix, spans: list[Span], share: Share) -> Matrix:
        seen = np.empty_like(rows)

        def compute(shards: slice, share: Share) -> None:
            projected = self.attention_input(rows, shards, share)
            for span in spans:
                into = span.of(seen).reshape(span.inputs, span.tokens, self.shards, self.heads, -1)
                self._attend(span.of(projected), into[:, :, shards].transpose(2, 0, 3, 1, 4))

        self._staged(compute, len(rows), share)
        return _total(self.attention_output(seen, slice(0, 1), share))

    def _attend(self, projected: Matrix, seen: Matrix) -> None:
        """What each token sees, by its query, of the values in its own input."""
        shape = (*projected.shape[:3], 3, self.heads, -1)
        queries, keys, values = projected.reshape(shape).transpose(3, 0, 1, 4, 2, 5)
        scores = queries @ keys.swapaxes(-1, -2)
        if max(-scores.min(), scores.max()) > SAFE_SCORE:
            scores -= np.maximum.reduce(scores, axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        np.matmul(scores, values, out=seen)
        seen /= (scores @ np.ones(scores.shape[-1], np.float32))[..., None]

    def _feed_forward(self, rows: Matrix, share: Share) -> Matrix:
        """Without the bias."""
        made: dict[int, Matrix] = {}

        def compute(shards: slice, share: Share) -> None:
            inner = _twice_gelu(self.up(rows, shards, share))
            made[shards.start] = _total(self.down(inner, shards, share))

        self._staged(compute, len(rows), share)
        return _total(made[first] for first in sorted(made))

    def _staged(self, compute: Stage, rows: int, share: Share) -> None:
        if rows < LEAST_SHARED_ROWS:
            compute(slice(0, self.shards), share)
        else:
            share(lambda shards: compute(shards, alone), self.shards, LEAST_WORK)


def _total(parts: Iterable[Matrix]) -> Matrix:
    """In place of the first."""
    total, *more = parts
    for part in more:
        total += part
    return total


def _twice_gelu(values: Matrix) -> Matrix:
    """Halving is in the next weights."""
    inner = values * values
    inner += GELU_LINEAR
    inner *= values
    np.tanh(inner, out=inner)
    inner += 1
    inner *= values
    return inner
