"""Holds quantised keys and values of several sequences: the batch form that mlx_lm lacks.

Shorter rows are padded on the left. `mlx_lm.models.base` uses quantised attention because the class
has `bits`.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import QuantizedKVCache

from rekindle.engine.mlx.layers import STEP


class MergingQuantizedKVCache(QuantizedKVCache):  # type: ignore[misc]  # mlx_lm has no types
    """mlx_lm's cache, which can join a batch."""

    def size(self) -> int:
        return int(self.offset)

    @classmethod
    def merge(cls, caches: Seq[QuantizedKVCache]) -> BatchQuantizedKVCache:
        return BatchQuantizedKVCache.merge(caches)


class BatchQuantizedKVCache:
    """One row per sequence: `offset` positions after `left_padding` ones of padding."""

    def __init__(self, left_padding: Seq[int], group_size: int, bits: int) -> None:
        self.group_size = group_size
        self.bits = bits
        self._buffers: list[mx.array] = []  # packed, scales and biases of keys, then of values
        self._length = 0  # positions of a row including its padding
        self.offset = self.left_padding = mx.array([])
        self._set_padding(left_padding)

    @classmethod
    def merge(cls, caches: Seq[QuantizedKVCache]) -> BatchQuantizedKVCache:
        rows = [cls._of_one(cache) for cache in caches]
        rows[0]._join(rows)
        return rows[0]

    @classmethod
    def _of_one(cls, cache: QuantizedKVCache) -> BatchQuantizedKVCache:
        row = cls([0], cache.group_size, cache.bits)
        if cache.offset:
            row._buffers = [*cache.keys, *cache.values]
        row._length = cache.offset
        row._set_padding([0])
        return row

    @property
    def state(self) -> tuple[list[mx.array], mx.array, mx.array]:
        return self._buffers, self.offset, self.left_padding

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self._buffers)

    def size(self) -> int:
        return self._length

    def empty(self) -> bool:
        return not self._buffers

    def make_mask(self, N: int, return_array: bool = False, **kwargs: Any) -> mx.array:
        mask: mx.array = create_causal_mask(
            N, offset=self._length, left_padding=self.left_padding, **kwargs
        )
        return mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        start, self._length = self._length, self._length + keys.shape[2]
        arrays = [
            part
            for each in (keys, values)
            for part in mx.quantize(each, group_size=self.group_size, bits=self.bits)
        ]
        if not self._buffers:
            self._buffers = [each[..., :0, :] for each in arrays]
        if self._buffers[0].shape[2] < self._length:
            capacity = _capacity(self._length)
            self._buffers = [_placed(each, start, 0, capacity) for each in self._buffers]
        for buffer, array in zip(self._buffers, arrays, strict=True):
            buffer[..., start : self._length, :] = array
        self.offset = self.offset + keys.shape[2]
        return self.keys_and_values()

    def keys_and_values(self) -> Any:
        held = [each[..., : self._length, :] for each in self._buffers]
        return tuple(held[:3]), tuple(held[3:])

    def filter(self, batch_indices: Seq[int]) -> None:
        """Keep these rows, and drop padding that all of them have."""
        padding = [self._padding[row] for row in batch_indices]
        least, rows = min(padding), mx.array(list(batch_indices))
        self._buffers = [each[rows][..., least:, :] for each in self._buffers]
        self._length -= least
        self._set_padding([each - least for each in padding])

    def extend(self, other: BatchQuantizedKVCache) -> None:
        self._join([self, other])

    def _join(self, batches: Seq[BatchQuantizedKVCache]) -> None:
        """Take over the rows of all these batches. Rows are aligned at their ends."""
        length = max(each._length for each in batches)
        if known := next((each._buffers for each in batches if each._buffers), None):
            placed = [each._placed_to(length, known) for each in batches]
            self._buffers = [mx.concatenate(list(parts)) for parts in zip(*placed, strict=True)]
        padding = [pad + length - each._length for each in batches for pad in each._padding]
        self._length = length
        self._set_padding(padding)

    def extract(self, idx: int) -> MergingQuantizedKVCache:
        cache = MergingQuantizedKVCache(group_size=self.group_size, bits=self.bits)
        start = self._padding[idx]
        cache.offset = self._length - start
        if self._buffers:
            row = [
                mx.contiguous(each[idx : idx + 1, :, start : self._length])
                for each in self._buffers
            ]
            cache.keys, cache.values = tuple(row[:3]), tuple(row[3:])
        return cache

    def _set_padding(self, padding: Seq[int]) -> None:
        """Keep Python numbers, which need no synchronisation, and arrays for the model."""
        self._padding = list(padding)
        self.left_padding = mx.array(self._padding)
        self.offset = mx.array([self._length - each for each in self._padding])

    def _placed_to(self, length: int, known: list[mx.array]) -> list[mx.array]:
        """Return buffers whose rows end at `length`, with spare capacity. `known` gives the shapes
        if this batch has no buffers yet."""
        rows, capacity = len(self._padding), _capacity(length)
        held = self._buffers or [mx.zeros((rows, *each.shape[1:]), each.dtype) for each in known]
        return [_placed(each, self._length, length - self._length, capacity) for each in held]


def _capacity(length: int) -> int:
    """Round up to whole steps, with room for at least one more position."""
    return (length // STEP + 1) * STEP


def _placed(array: mx.array, length: int, left: int, capacity: int) -> mx.array:
    """Move the first positions of a buffer by `left`, into a buffer of another capacity."""
    right = capacity - length - left
    return mx.pad(array[..., :length, :], [(0, 0), (0, 0), (left, right), (0, 0)])
