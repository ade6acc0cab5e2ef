"""Writes GGUF files: fields, descriptions of tensors, and their data chunk by chunk."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import BinaryIO

from rekindle.models.gguf import ARRAY, BLOCKS, DEFAULT_ALIGNMENT, MAGIC, STRING, UINT32

INT32, FLOAT32, BOOL = 5, 6, 7  # gguf_type

Values = Sequence[str] | Sequence[bool] | Sequence[int] | Sequence[float]
Chunk = bytes | memoryview
Field = str | bool | int | float | Values


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of a file. `chunks` yields its data in order."""

    name: str
    shape: tuple[int, ...]  # as NumPy orders it
    kind: int  # ggml's type id
    chunks: Callable[[], Iterator[Chunk]]

    @property
    def size_bytes(self) -> int:
        block_elements, block_bytes = BLOCKS[self.kind]
        return prod(self.shape) // block_elements * block_bytes


def write_gguf(
    path: Path,
    fields: Mapping[str, Field],
    tensors: Sequence[GgufTensor],
    advance: Callable[[int], None] = lambda _written_bytes: None,
) -> None:
    """Write a GGUF file. Equal arguments give equal bytes. Holds one chunk in memory."""
    with path.open("wb") as file:
        advance(_write_padded(file, [gguf_header(fields, tensors)]))
        for tensor in tensors:
            written = _write_padded(file, tensor.chunks(), advance)
            if written != tensor.size_bytes:
                raise ValueError(f"{tensor.name} has {written} bytes, not {tensor.size_bytes}")


def file_bytes(fields: Mapping[str, Field], tensors: Sequence[GgufTensor]) -> int:
    """Return the size of the file that `write_gguf` would write."""
    header_bytes = _aligned(len(gguf_header(fields, tensors)))
    return header_bytes + sum(_aligned(tensor.size_bytes) for tensor in tensors)


def gguf_header(fields: Mapping[str, Field], tensors: Sequence[GgufTensor]) -> bytes:
    offsets = accumulate((_aligned(tensor.size_bytes) for tensor in tensors), initial=0)
    return b"".join(
        [
            MAGIC,
            struct.pack("<IQQ", 3, len(tensors), len(fields)),
            *(_text(key) + _field(value) for key, value in fields.items()),
            *(_described(*each) for each in zip(tensors, offsets, strict=False)),
        ]
    )


def _write_padded(
    file: BinaryIO,
    chunks: Iterable[Chunk],
    advance: Callable[[int], None] = lambda _written_bytes: None,
) -> int:
    """Write chunks and pad them to the alignment. Returns their size without the padding."""
    size = 0
    for chunk in chunks:
        written = file.write(chunk)
        size += written
        advance(written)
    file.write(bytes(_aligned(size) - size))
    return size


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


def _array(values: Values) -> bytes:
    match values[0]:
        case str():
            kind, packed = STRING, b"".join(_text(str(each)) for each in values)
        case bool():
            kind, packed = BOOL, struct.pack(f"<{len(values)}?", *values)
        case int():
            kind, packed = INT32, struct.pack(f"<{len(values)}i", *values)
        case _:
            kind, packed = FLOAT32, struct.pack(f"<{len(values)}f", *values)
    return struct.pack("<IIQ", ARRAY, kind, len(values)) + packed


def _described(tensor: GgufTensor, offset: int) -> bytes:
    shape = tensor.shape[::-1]  # ggml starts with the fastest dimension
    numbers = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return _text(tensor.name) + numbers + struct.pack("<IQ", tensor.kind, offset)
