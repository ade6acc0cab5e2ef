"""Keeps the positions of M-RoPE as part of a sequence's state.

With M-RoPE (Qwen-VL) all tokens of an image begin at one position and differ in row and column, and
text continues after the largest of these numbers. So positions do not follow from the number of
tokens. They are stored like keys and values, one pair of integers for each token. Every operation
on caches (blocks, sharing, truncating, batches) therefore keeps them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache

PLACE = 3  # numbers at the end of each vector: its row, its column, positions of the image


class PositionCache(KVCache):  # type: ignore[misc]  # mlx_lm has no types
    """The "key" of a token is the position at which it, or its image, begins. The "value" is the
    first position after it, or after its image."""

    @classmethod
    def merge(cls, caches: Seq[PositionCache]) -> BatchPositionCache:
        return BatchPositionCache.merge(caches)


class BatchPositionCache(BatchKVCache):  # type: ignore[misc]
    """The positions of several sequences, padded on the left with zeros."""

    @classmethod
    def merge(cls, caches: Seq[PositionCache]) -> BatchPositionCache:
        merged, batch = BatchKVCache.merge(caches), cls([0] * len(caches))
        batch.__dict__.update(merged.__dict__)
        return batch

    def extract(self, idx: int) -> PositionCache:
        cache = PositionCache()
        cache.__dict__.update(super().extract(idx).__dict__)
        return cache


def add_text(cache: Any, tokens: mx.array) -> mx.array:
    """Append text, (rows, tokens), and return its positions: (3, rows, tokens)."""
    rows, count = tokens.shape
    begins = _last(cache, cache.values, rows) + mx.arange(count, dtype=mx.int32)
    _append(cache, begins, begins + 1)
    return mx.broadcast_to(begins, (3, rows, count))


def add_image(cache: Any, places: mx.array, *, begins: bool) -> mx.array:
    """Append vectors of one image, and return their positions: (3, 1, vectors).

    `places` has a row of `PLACE` numbers for each vector. `begins` tells that the first one is the
    first of its image. Otherwise they continue the image at the end of the cache.
    """
    rows, columns, lengths = mx.split(places.astype(mx.int32).T, PLACE)
    start = _last(cache, cache.values if begins else cache.keys, 1)
    times = mx.broadcast_to(start, rows.shape)
    _append(cache, times, start + lengths)
    return mx.stack([times, start + rows, start + columns])


def _last(cache: Any, numbers: mx.array | None, rows: int) -> mx.array:
    """Return the number of the last token of each row, or 0: (rows, 1)."""
    end = cache.size()
    if numbers is None or not end:
        return mx.zeros((rows, 1), mx.int32)
    return numbers[:, 0, end - 1]


def _append(cache: Any, begins: mx.array, ends: mx.array) -> None:
    cache.update_and_fetch(begins[:, None, :, None], ends[:, None, :, None])
