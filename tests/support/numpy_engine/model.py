"""A transformer whose weights come from a seed.

Every sum runs over one axis of one row in a fixed order. The state of a token therefore depends
only on the tokens before it, and not on how a prompt is split into steps or on the rest of a batch.
BLAS does not guarantee this.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rekindle.errors import ModelError

Array = np.ndarray[Any, np.dtype[np.float32]]

WIDTH, HIDDEN, HEADS, HEAD_WIDTH = 32, 64, 2, 8
SHARPNESS = np.float32(4)  # scale of attention; answers then depend on more than the last token
FORMAT = "tinynp 1"
ABOVE_ASCII = -20.0


@dataclass(frozen=True, slots=True)
class ModelFile:
    """The content of a model file."""

    seed: int
    layers: int
    context_tokens: int

    def write(self, path: Path) -> Path:
        fields = {"seed": self.seed, "layers": self.layers, "context_tokens": self.context_tokens}
        path.write_text(json.dumps({"format": FORMAT, **fields}))
        return path

    @classmethod
    def read(cls, path: Path) -> ModelFile:
        try:
            fields = json.loads(path.read_text())
            if fields.pop("format") != FORMAT:
                raise ModelError(f"{path.name} is not of the format {FORMAT}")
            return cls(**fields)
        except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
            raise ModelError(f"{path.name} is damaged: {error!r}") from error


def write_numpy(path: Path, *, seed: int = 0, layers: int = 2, context: int = 4096) -> Path:
    return ModelFile(seed, layers, context).write(path)


@dataclass(frozen=True, slots=True)
class _Layer:
    query: Array
    key: Array
    value: Array
    output: Array
    up: Array
    down: Array


class TinyTransformer:
    def __init__(self, file: ModelFile, vocabulary_size: int) -> None:
        random = np.random.default_rng(file.seed)

        def matrix(rows: int, columns: int) -> Array:
            values = random.standard_normal((rows, columns)) * columns**-0.5
            return np.asarray(values, np.float32)

        inner = HEADS * HEAD_WIDTH
        self.context_tokens = file.context_tokens
        self._embedding = matrix(vocabulary_size, WIDTH)
        self._output = matrix(vocabulary_size, WIDTH)
        self._bias = np.zeros(vocabulary_size, np.float32)
        self._bias[-128:] = ABOVE_ASCII  # no bytes above ASCII, so that it writes whole characters
        self._layers = [
            _Layer(
                query=matrix(inner, WIDTH) * SHARPNESS,
                key=matrix(inner, WIDTH),
                value=matrix(inner, WIDTH),
                output=matrix(WIDTH, inner),
                up=matrix(HIDDEN, WIDTH),
                down=matrix(WIDTH, HIDDEN),
            )
            for _ in range(file.layers)
        ]
        self._cosines, self._sines = _rotations(file.context_tokens)

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of the KV row of one token: keys and values of each layer."""
        return (len(self._layers), 2, HEADS, HEAD_WIDTH)

    def embedded(self, tokens: Seq[int]) -> Array:
        return self._embedding[list(tokens)]

    def forward(
        self, hidden: Array, rows: Array, kept: Callable[[Array], Array] = lambda row: row
    ) -> Array:
        """Return the last hidden state of each token, and append their KV rows to `rows` in the
        precision of the KV type."""
        count = len(hidden)
        start = len(rows) - count
        for number, layer in enumerate(self._layers):
            before = _normalised(hidden)
            query, key, value = (
                _linear(weights, before).reshape(count, HEADS, HEAD_WIDTH)
                for weights in (layer.query, layer.key, layer.value)
            )
            rows[start:, number, 0] = kept(self._rotated(key, start))
            rows[start:, number, 1] = kept(value)
            query = self._rotated(query, start)
            seen = rows[:, number]
            attended = [_attend(query[n], seen[: start + n + 1]) for n in range(count)]
            hidden = hidden + _linear(layer.output, np.stack(attended))
            lifted = _linear(layer.up, _normalised(hidden))
            hidden = hidden + _linear(layer.down, np.maximum(lifted, 0))
        return _normalised(hidden)

    def logits(self, hidden: Array) -> Array:
        """The logits of one token, from its last hidden state."""
        [row] = _linear(self._output, hidden[None])
        return np.asarray(row + self._bias, np.float32)

    def _rotated(self, heads: Array, start: int) -> Array:
        """Apply rotary position embeddings, starting at position `start`."""
        stop = start + len(heads)
        cosines, sines = self._cosines[start:stop, None], self._sines[start:stop, None]
        one, other = heads[..., : HEAD_WIDTH // 2], heads[..., HEAD_WIDTH // 2 :]
        turned = (one * cosines - other * sines, one * sines + other * cosines)
        return np.concatenate(turned, axis=-1)


def _rotations(positions: int) -> tuple[Array, Array]:
    frequencies = 100.0 ** -(np.arange(HEAD_WIDTH // 2) / (HEAD_WIDTH // 2))
    angles = np.arange(positions)[:, None] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _linear(weights: Array, rows: Array) -> Array:
    """Multiply each row with the matrix.

    The sum over the last axis does not depend on other rows.
    """
    product: Array = (rows[:, None, :] * weights).sum(axis=-1)
    return product


def _normalised(rows: Array) -> Array:
    scale: Array = rows / np.sqrt((rows * rows).mean(axis=-1, keepdims=True) + np.float32(1e-5))
    return scale


def _attend(query: Array, seen: Array) -> Array:
    """Attention of one token over all positions up to its own."""
    keys, values = seen[:, 0], seen[:, 1]
    scores = (keys * query).sum(axis=-1) * np.float32(HEAD_WIDTH**-0.5)
    weights = np.exp(scores - scores.max(axis=0))
    mixed: Array = (weights[:, :, None] * values).sum(axis=0) / weights.sum(axis=0)[:, None]
    return mixed.reshape(-1)
