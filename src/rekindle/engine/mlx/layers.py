"""Reads and writes the state of one layer in a cache of mlx_lm.

A `Positions` layer stores every position, so any range of it can be read and appended. The state of
other layers belongs to the end of the sequence.

The names and fields of these dataclasses are part of the fingerprint of stored state, which hashes
their `repr`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from rekindle.engine.base import Blob
from rekindle.engine.mlx.positions import PositionCache
from rekindle.errors import CorruptBlock, ModelError


def size_bytes(shape: Seq[int], dtype: mx.Dtype) -> int:
    return math.prod(shape) * int(dtype.size)


def joined(parts: Seq[bytes | mx.array]) -> bytes:
    """Concatenate bytes and arrays. The arrays are computed together and copied once."""
    # Viewed as uint8, because Python buffers have no bfloat16.
    raw: list[Any] = [
        each if isinstance(each, bytes) else mx.contiguous(each).reshape(-1).view(mx.uint8)
        for each in parts
        if isinstance(each, bytes) or each.size
    ]
    mx.eval([each for each in raw if isinstance(each, mx.array)])
    return b"".join(memoryview(each) for each in raw)


class Reader:
    """Parses a blob from its beginning. Allocates nothing for bytes that are missing."""

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
        if self._at != len(self._view):
            raise CorruptBlock(f"a block has {len(self._view) - self._at} bytes too many")

    def _take(self, count: int) -> memoryview:
        start, self._at = self._at, self._at + count
        if self._at > len(self._view):
            raise CorruptBlock(f"{self._at - len(self._view)} bytes of a block are missing")
        return self._view[start : self._at]


_POSITIONS_AXIS = 2
STEP = 256  # buffers grow by a multiple of this many positions, as in mlx_lm
_INDEX = _DIMENSION = struct.Struct("<I")
_PRESENT = struct.Struct("<?")
_KINDS = {KVCache, RotatingKVCache, ChunkedKVCache, ArraysCache, PositionCache}

Part = bytes | mx.array  # of a blob


@dataclass(frozen=True, slots=True)
class Rows:
    """The shape of an array of (1, heads, positions, width)."""

    heads: int
    width: int
    dtype: mx.Dtype

    @classmethod
    def of(cls, array: mx.array) -> Rows:
        return cls(array.shape[1], array.shape[3], array.dtype)

    def shape(self, positions: int) -> tuple[int, int, int, int]:
        return (1, self.heads, positions, self.width)

    def size_bytes(self, positions: int) -> int:
        return size_bytes(self.shape(positions), self.dtype)


def leaves(caches: Seq[Any]) -> Iterator[Any]:
    """Yield the caches in the order of their layers, with lists of caches flattened."""
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from leaves(cache.caches)
        else:
            yield cache


def buffers(cache: Any) -> list[mx.array]:
    """Return the arrays of keys, then those of values. Quantised ones have three each."""
    if cache.keys is None:
        return []
    if isinstance(cache, QuantizedKVCache):
        return [*cache.keys, *cache.values]
    return [cache.keys, cache.values]


def set_buffers(cache: Any, arrays: Seq[mx.array]) -> None:
    if not arrays:
        cache.keys = cache.values = None
    elif isinstance(cache, QuantizedKVCache):
        half = len(arrays) // 2
        cache.keys, cache.values = tuple(arrays[:half]), tuple(arrays[half:])
    else:
        cache.keys, cache.values = arrays


@dataclass(frozen=True, slots=True)
class Positions:
    """Keys and values of every position, plain or quantised."""

    rows: tuple[Rows, ...]

    @property
    def token_bytes(self) -> int:
        return sum(each.size_bytes(1) for each in self.rows)

    @property
    def has_integers(self) -> bool:
        """Whether these are positions of M-RoPE, which are never quantised."""
        return any(each.dtype == mx.int32 for each in self.rows)

    def read(self, cache: Any, start: int, stop: int) -> list[Part]:
        if self.rows and not 0 <= start <= stop <= cache.offset:
            raise ValueError(f"a cache of {cache.offset} positions has no range {start} to {stop}")
        return [each[..., start:stop, :] for each in buffers(cache)]

    def parse(self, reader: Reader, positions: int) -> list[mx.array]:
        return [reader.array(each.shape(positions), each.dtype) for each in self.rows]

    def append(self, cache: Any, arrays: Seq[mx.array], start: int, stop: int) -> None:
        """Write into the buffers in place. They grow by a quarter, so that the cost of appending
        blocks is proportional to their number. Lazy."""
        if not arrays:
            return
        if cache.offset != start:
            raise ValueError(f"cannot append position {start} to a cache of {cache.offset}")
        held = buffers(cache) or [mx.zeros(each.shape(0), each.dtype) for each in self.rows]
        capacity = held[0].shape[_POSITIONS_AXIS]
        if capacity < stop:
            capacity = -(-max(stop, capacity * 5 // 4) // STEP) * STEP
            held = [_grown(each[..., :start, :], capacity) for each in held]
        for buffer, array in zip(held, arrays, strict=True):
            buffer[..., start:stop, :] = array
        set_buffers(cache, held)
        cache.offset = stop


def _grown(array: mx.array, capacity: int) -> mx.array:
    _, heads, positions, width = array.shape
    rest = mx.zeros((1, heads, capacity - positions, width), array.dtype)
    return mx.concatenate([array, rest], axis=_POSITIONS_AXIS)


def _check_end(cache: Any, position: int) -> None:
    if cache.offset != position:
        raise ValueError(f"a checkpoint belongs to the end, {cache.offset}, not to {position}")


@dataclass(frozen=True, slots=True)
class Window:
    """The last positions of a RotatingKVCache, and the first few that it always keeps.

    They stay in the order of the buffer, because the last bits of a sum depend on it.
    """

    rows: tuple[Rows, ...]
    most: int
    keep: int

    @property
    def max_bytes(self) -> int:
        return _INDEX.size + sum(each.size_bytes(self.most) for each in self.rows)

    def read(self, cache: Any, position: int) -> list[Part]:
        if not self.rows:
            return [_INDEX.pack(0)]
        _check_end(cache, position)
        count = min(position, self.most)
        index, arrays = cache._idx, buffers(cache)
        length = arrays[0].shape[_POSITIONS_AXIS]
        if index == length:  # in order; the next step drops positions behind the window
            index = count
            if excess := length - count:
                arrays = [cache._trim(excess, each) for each in arrays]
        return [_INDEX.pack(index), *(each[..., :count, :] for each in arrays)]

    def parse(self, reader: Reader, position: int) -> tuple[int, list[mx.array]]:
        (index,) = reader.unpack(_INDEX)
        count = min(position, self.most)
        # Only a full window wraps around.
        if self.rows and index != count and not (count == self.most and self.keep < index < count):
            raise CorruptBlock(f"the window of {position} positions cannot end at {index}")
        return index, [reader.array(each.shape(count), each.dtype) for each in self.rows]

    def resume(self, cache: Any, state: tuple[int, list[mx.array]], position: int) -> None:
        index, arrays = state
        set_buffers(cache, arrays)
        cache._idx, cache.offset = index, position if arrays else 0


@dataclass(frozen=True, slots=True)
class Chunk:
    rows: tuple[Rows, ...]
    most: int

    @property
    def max_bytes(self) -> int:
        return sum(each.size_bytes(self.most) for each in self.rows)

    def read(self, cache: Any, position: int) -> list[Part]:
        if self.rows:
            _check_end(cache, position)
        stop = cache.offset - cache.start_position
        start = max(0, stop - self.most)  # the next step drops earlier positions
        return [each[..., start:stop, :] for each in buffers(cache)]

    def parse(self, reader: Reader, position: int) -> list[mx.array]:
        count = min(position, self.most)
        return [reader.array(each.shape(count), each.dtype) for each in self.rows]

    def resume(self, cache: Any, state: list[mx.array], position: int) -> None:
        set_buffers(cache, state)
        cache.offset = position if state else 0
        cache.start_position = max(0, cache.offset - self.most)


@dataclass(frozen=True, slots=True)
class Slot:
    """One array of a recurrent layer, with its shapes after a short and a longer sequence."""

    least: tuple[int, ...]
    most: tuple[int, ...]
    dtype: mx.Dtype

    def takes(self, shape: Seq[int]) -> bool:
        return len(shape) == len(self.most) and all(
            least <= size <= most
            for least, size, most in zip(self.least, shape, self.most, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Recurrent:
    """The arrays of an ArraysCache; None for one that the model does not use."""

    slots: tuple[Slot | None, ...]

    @property
    def max_bytes(self) -> int:
        return sum(
            _PRESENT.size
            + (len(slot.most) * _DIMENSION.size + size_bytes(slot.most, slot.dtype) if slot else 0)
            for slot in self.slots
        )

    def read(self, cache: Any, _position: int) -> list[Part]:
        parts: list[Part] = []
        for array in cache.cache:
            parts.append(_PRESENT.pack(array is not None))
            if array is not None:
                parts += [_DIMENSION.pack(each) for each in array.shape]
                parts.append(array)
        return parts

    def parse(self, reader: Reader, _position: int) -> list[mx.array | None]:
        return [self._parse_slot(slot, reader) for slot in self.slots]

    def _parse_slot(self, slot: Slot | None, reader: Reader) -> mx.array | None:
        (present,) = reader.unpack(_PRESENT)
        if not present:
            return None
        if slot is None:
            raise CorruptBlock("a checkpoint has an array that the model does not have")
        shape = tuple(reader.unpack(_DIMENSION)[0] for _ in slot.most)
        if not slot.takes(shape):
            raise CorruptBlock(f"a checkpoint has an array of {shape}, the model of {slot.most}")
        return reader.array(shape, slot.dtype)

    def resume(self, cache: Any, state: list[mx.array | None], _position: int) -> None:
        cache.cache = state


Layer = Positions | Window | Chunk | Recurrent


def check_kinds(caches: Seq[Any]) -> None:
    """Raise ModelError for an unknown cache class. A subclass is unknown: it may hold more."""
    if unknown := sorted({type(cache) for cache in leaves(caches)} - _KINDS, key=str):
        raise ModelError(
            f"this model keeps its state in a {unknown[0].__name__}, which is not supported: "
            "only the caches of mlx_lm.models.cache are"
        )


def layer_of(cache: Any, earlier: Any) -> Layer:
    """Describe the state of a used cache. `earlier` is its copy before the last step."""
    if isinstance(cache, ArraysCache):
        pairs = zip(earlier.cache, cache.cache, strict=True)
        return Recurrent(tuple(_slot(before, after) for before, after in pairs))
    rows = tuple(Rows.of(each) for each in buffers(cache))
    if isinstance(cache, RotatingKVCache):
        return Window(rows, cache.max_size, cache.keep)
    if isinstance(cache, ChunkedKVCache):
        return Chunk(rows, cache.chunk_size)
    return Positions(rows)


def _slot(before: mx.array | None, after: mx.array | None) -> Slot | None:
    if after is None:
        return None
    least = after if before is None else before
    return Slot(tuple(least.shape), tuple(after.shape), after.dtype)
