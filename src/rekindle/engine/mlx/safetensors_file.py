"""The arrays of a safetensors file that somebody else made: what its header says is checked before
anything is read."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from rekindle.errors import BadRequest

_DTYPES: dict[str, mx.Dtype] = {
    "BOOL": mx.bool_,
    "U8": mx.uint8,
    "I8": mx.int8,
    "U16": mx.uint16,
    "I16": mx.int16,
    "U32": mx.uint32,
    "I32": mx.int32,
    "U64": mx.uint64,
    "I64": mx.int64,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "F32": mx.float32,
}
_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 32 << 20
_MOST_DIMENSIONS = 8


@dataclass(frozen=True, slots=True)
class _Place:
    dtype: mx.Dtype
    shape: tuple[int, ...]
    begin: int  # its first byte, behind the header

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * int(self.dtype.size)


class SafetensorsFile:
    """Raises BadRequest for whatever is not a safetensors file. It is read when an array is.

    Its arrays lie beside each other: all of them together take no more memory than the file."""

    def __init__(self, path: Path, most_entries: int) -> None:
        """`most_entries`: of its metadata, and as many arrays."""
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if not 0 < length <= min(_MOST_HEADER_BYTES, size_bytes - _LENGTH_BYTES):
                raise _wrong("it does not begin with a header")
            header = _parsed(file.read(length))
        self._path = path
        self._start = _LENGTH_BYTES + length
        self._data_bytes = size_bytes - self._start
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(
            isinstance(text, str) for text in metadata.values()
        ):
            raise _wrong("its metadata are not texts")
        if max(len(metadata), len(header)) > most_entries:
            raise _wrong("it has more arrays or metadata than there are in state of this model")
        self.metadata: dict[str, str] = metadata
        self._places = {name: self._place(name, about) for name, about in header.items()}
        self._check_overlaps()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._found(name).shape

    def dtype(self, name: str) -> mx.Dtype:
        return self._found(name).dtype

    def size_bytes(self, name: str) -> int:
        return self._found(name).size_bytes

    def array(self, name: str) -> mx.array:
        place = self._found(name)
        if not place.size_bytes:
            return mx.zeros(place.shape, place.dtype)
        begin = self._start + place.begin
        raw = np.memmap(self._path, np.uint8, "r", begin, (place.size_bytes,))
        return mx.array(raw).view(place.dtype).reshape(place.shape)

    def number(self, name: str) -> int:
        """A whole number that is an array of one."""
        whole = (mx.int32, mx.int64, mx.uint32)
        if math.prod(self.shape(name)) != 1 or self.dtype(name) not in whole:
            raise _wrong(f"{name} is no whole number")
        found: Any = self.array(name).item()
        return int(found)

    def text(self, name: str) -> str:
        """A short text that is an array of its characters' numbers."""
        shape = self.shape(name)
        if len(shape) != 1 or shape[0] > 64:
            raise _wrong(f"{name} is no text")
        found: Any = self.array(name).tolist()
        return bytes(each for each in found if 0 <= each < 128).decode()

    def _found(self, name: str) -> _Place:
        if name not in self._places:
            raise _wrong(f"{name} is missing")
        return self._places[name]

    def _place(self, name: str, about: object) -> _Place:
        """Where an array is, which lies within the file."""
        match about:
            case {"dtype": str() as kind, "shape": list() as shape, "data_offsets": [begin, end]}:
                numbers = [*shape, begin, end]
                if kind not in _DTYPES or len(shape) > _MOST_DIMENSIONS:
                    raise _wrong(f"{name} has a type or a shape that is not known")
                if not all(type(each) is int and each >= 0 for each in numbers):
                    raise _wrong(f"{name} has no shape or no place")
                place = _Place(_DTYPES[kind], tuple(shape), begin)
                if end - begin != place.size_bytes or end > self._data_bytes:
                    raise _wrong(f"{name} does not lie within the file")
                return place
        raise _wrong(f"{name} has no type, no shape or no place")

    def _check_overlaps(self) -> None:
        end = 0
        for begin, size_bytes in sorted(
            (each.begin, each.size_bytes) for each in self._places.values()
        ):
            if begin < end:
                raise _wrong("its arrays overlap")
            end = begin + size_bytes


def _parsed(header: bytes) -> dict[str, Any]:
    try:
        found = json.loads(header)
    except (ValueError, RecursionError):
        raise _wrong("its header is not JSON") from None
    if not isinstance(found, dict):
        raise _wrong("its header is no object")
    return found


def _wrong(what: str) -> BadRequest:
    return BadRequest(f"This is no safetensors file with a prompt cache: {what}.", param="file")
