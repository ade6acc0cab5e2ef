"""Writes GGUF files: fields of a few types, and tensors of f32 and f16."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from rekindle.models.gguf import ARRAY, DEFAULT_ALIGNMENT, MAGIC, STRING, UINT32

VERSION = 3
INT32, FLOAT32, BOOL = 5, 6, 7
TENSOR_KINDS = {np.dtype(np.float32): 0, np.dtype(np.float16): 1}  # by ggml's type id

Field = str | bool | int | float | Sequence[str] | Sequence[int]
Tensor = np.ndarray[Any, Any]


def write_gguf(
    path: Path,
    fields: Mapping[str, Field],
    tensors: Mapping[str, Tensor],
    advance: Callable[[int], None] = lambda _written_bytes: None,
) -> None:
    """Equal arguments give equal bytes."""
    sizes = [_aligned(tensor.nbytes) for tensor in tensors.values()]
    offsets = accumulate(sizes, initial=0)
    header = b"".join(
        [
            MAGIC,
            struct.pack("<IQQ", VERSION, len(tensors), len(fields)),
            *(_text(key) + _field(value) for key, value in fields.items()),
            *(
                _tensor_info(name, tensor, offset)
                for (name, tensor), offset in zip(tensors.items(), offsets, strict=False)
            ),
        ]
    )
    with path.open("wb") as file:
        for content in (header, *(each.tobytes() for each in tensors.values())):
            size = file.write(content)
            file.write(bytes(_aligned(size) - size))
            advance(size)


def _aligned(size: int) -> int:
    return -(-size // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _field(value: Field) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", BOOL, value)
        case int():
            return struct.pack("<II", UINT32, value)
        case float():
            return struct.pack("<If", FLOAT32, value)
        case str():
            return struct.pack("<I", STRING) + _text(value)
        case _:
            return _array(value)


def _array(values: Sequence[str] | Sequence[int]) -> bytes:
    kind = STRING if isinstance(values[0], str) else INT32
    start = struct.pack("<IIQ", ARRAY, kind, len(values))
    packed = (_text(each) if isinstance(each, str) else struct.pack("<i", each) for each in values)
    return start + b"".join(packed)


def _tensor_info(name: str, tensor: Tensor, offset: int) -> bytes:
    shape = tensor.shape[::-1]  # ggml counts from the fastest dimension
    numbers = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return _text(name) + numbers + struct.pack("<IQ", TENSOR_KINDS[tensor.dtype], offset)
