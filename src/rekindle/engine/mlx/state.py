"""Exports and restores the state of a sequence in mlx_lm's caches.

A block is a header and, layer by layer, the keys and values of a range of positions. The state of
other layers (windows, recurrent state) belongs to the end of the sequence. It is the checkpoint of
a resumable block, and follows the positions.
"""

from __future__ import annotations

import copy
import struct
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, QuantizedKVCache

from rekindle.engine.base import Blob
from rekindle.engine.mlx.layers import (
    Layer,
    Part,
    Positions,
    Reader,
    buffers,
    joined,
    layer_of,
    leaves,
    set_buffers,
)
from rekindle.errors import CorruptBlock

_MAGIC = b"RKmx"
_HEADER = struct.Struct("<4sI")  # magic, positions
_CHECKPOINT = struct.Struct("<Q")  # its position

Caches = Seq[Any]  # of one sequence, one for each layer


def block_header(tokens: int) -> bytes:
    return _HEADER.pack(_MAGIC, tokens)


@dataclass(frozen=True)
class StateLayout:
    """The layout of blocks. Everything is checked before caches change."""

    layers: tuple[Layer, ...]

    @classmethod
    def of(cls, caches: Caches, earlier: Caches) -> StateLayout:
        """Derive the layout from used caches. `earlier` shares their state before the last step."""
        pairs = zip(leaves(caches), leaves(earlier), strict=True)
        return cls(tuple(layer_of(cache, before) for cache, before in pairs))

    @cached_property
    def positions(self) -> tuple[Positions, ...]:
        """The layers that store every position."""
        return tuple(each for each in self.layers if isinstance(each, Positions))

    @cached_property
    def can_truncate(self) -> bool:
        return len(self.positions) == len(self.layers)

    @cached_property
    def token_bytes(self) -> int:
        return sum(each.token_bytes for each in self.positions)

    @cached_property
    def checkpoint_bytes(self) -> int:
        """Largest size of a checkpoint. One of a window that is not full is smaller."""
        if self.can_truncate:
            return 0
        ends = (each.max_bytes for each in self.layers if not isinstance(each, Positions))
        return _CHECKPOINT.size + sum(ends)

    def export_block(
        self, caches: Caches, start: int, stop: int, *, resumable: bool = False
    ) -> bytes:
        """Export positions [start, stop). `resumable` adds a checkpoint, only at the end."""
        parts: list[Part] = [block_header(stop - start)]
        ends: list[Part] = [_CHECKPOINT.pack(stop)]
        for layer, cache in zip(self.layers, leaves(caches), strict=True):
            if isinstance(layer, Positions):
                parts += layer.read(cache, start, stop)
            elif resumable:
                ends += layer.read(cache, stop)
        return joined([*parts, *ends] if resumable and not self.can_truncate else parts)

    def restore_block(
        self, caches: Caches, blob: Blob, start: int, stop: int, *, resumable: bool = False
    ) -> None:
        """Append positions [start, stop), and resume from the checkpoint; raises CorruptBlock."""
        reader = Reader(blob)
        arrays = iter(self.parse_positions(reader, stop - start))
        ends = iter(self._parse_checkpoint(reader, stop) if resumable else ())
        reader.end()
        for layer, cache in zip(self.layers, leaves(caches), strict=True):
            if isinstance(layer, Positions):
                layer.append(cache, next(arrays), start, stop)
            elif resumable:
                layer.resume(cache, next(ends), stop)
        mx.eval([cache.state for cache in leaves(caches)])

    def parse_positions(self, reader: Reader, tokens: int) -> list[list[mx.array]]:
        """Return the arrays of each layer with positions; raises CorruptBlock."""
        if reader.unpack(_HEADER) != (_MAGIC, tokens):
            raise CorruptBlock(f"this is not a block of {tokens} tokens")
        return [layer.parse(reader, tokens) for layer in self.positions]

    def _parse_checkpoint(self, reader: Reader, position: int) -> list[Any]:
        if self.can_truncate:
            return []
        if reader.unpack(_CHECKPOINT) != (position,):
            raise CorruptBlock("a checkpoint belongs to another position")
        ends = (each for each in self.layers if not isinstance(each, Positions))
        return [layer.parse(reader, position) for layer in ends]


def share(caches: Caches, tokens: int) -> list[Any]:
    """Return caches with the first `tokens` of others: all of them if state cannot be truncated.

    They refer to the same memory. The first writer copies what it keeps.
    """
    return [_shared(cache, tokens) for cache in caches]


def _shared(cache: Any, tokens: int) -> Any:
    twin = copy.copy(cache)
    if isinstance(cache, CacheList):
        twin.caches = tuple(_shared(each, tokens) for each in cache.caches)
    elif isinstance(cache, ArraysCache):
        twin.cache = [None if each is None else copy.copy(each) for each in cache.cache]
    elif isinstance(cache, KVCache | QuantizedKVCache):
        if buffers(cache):  # a slice, so that a writer copies only what it shares
            set_buffers(twin, [each[..., :tokens, :] for each in buffers(cache)])
            twin.offset = tokens
    else:
        # Arrays are written in place, so each cache needs its own handles.
        set_buffers(twin, [copy.copy(each) for each in buffers(cache)])
    return twin


def truncate(caches: Caches, tokens: int) -> None:
    """Forget everything after the first `tokens`; only 0 if state cannot be truncated."""
    for cache in leaves(caches):
        if isinstance(cache, KVCache | QuantizedKVCache) and tokens:
            cache.offset = min(cache.offset, tokens)
        elif tokens:
            raise ValueError("this model's state cannot be truncated")
        elif isinstance(cache, ArraysCache):
            cache.cache = [None] * len(cache.cache)
        else:
            set_buffers(cache, ())
            for name in ("offset", "_idx", "start_position"):
                if hasattr(cache, name):
                    setattr(cache, name, 0)
