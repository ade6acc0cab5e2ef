"""Arrays as bytes and back: in their own type, row by row, without a header."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence as Seq
from typing import Any

import mlx.core as mx
import numpy as np

from rekindle.engine.base import Blob
from rekindle.errors import CorruptBlock


def size_bytes(shape: Seq[int], dtype: mx.Dtype) -> int:
    return math.prod(shape) * int(dtype.size)


def joined(parts: Seq[bytes | mx.array]) -> bytes:
    """Bytes as they are and arrays, which are computed together and copied once."""
    # By way of uint8, because a buffer has no bfloat16.
    raw: list[Any] = [
        each if isinstance(each, bytes) else mx.contiguous(each).reshape(-1).view(mx.uint8)
        for each in parts
        if isinstance(each, bytes) or each.size
    ]
    mx.eval([each for each in raw if isinstance(each, mx.array)])
    return b"".join(memoryview(each) for each in raw)


class Reader:
    """Takes a blob apart from its beginning. Nothing is allocated for bytes that are not there."""

    def __init__(self, blob: Blob) -> None:
        self._view = memoryview(blob).cast("B")
        self._at = 0

    def unpack(self, form: struct.Struct) -> tuple[Any, ...]:
        return form.unpack(self._take(form.size))

    def array(self, shape: Seq[int], dtype: mx.Dtype) -> mx.array:
        raw = np.frombuffer(self._take(size_bytes(shape, dtype)), np.uint8)
        if not raw.size:
            return mx.zeros(shape, dtype)
        return mx.array(raw).view(dtype).reshape(shape)

    def rest(self) -> memoryview:
        return self._take(len(self._view) - self._at)

    def end(self) -> None:
        """Raise CorruptBlock if anything is left."""
        if self._at != len(self._view):
            raise CorruptBlock(f"{len(self._view) - self._at} bytes behind the end of a block")

    def _take(self, count: int) -> memoryview:
        start, self._at = self._at, self._at + count
        if self._at > len(self._view):
            raise CorruptBlock(f"{self._at - len(self._view)} bytes of a block are missing")
        return self._view[start : self._at]
