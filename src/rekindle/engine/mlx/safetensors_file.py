"""The arrays of a safetensors file that somebody else made: what its header says is checked before
anything is read."""

from __future__ import annotations

import json
import math
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


class SafetensorsFile:
    """Raises BadRequest for whatever is not a safetensors file. It is read when an array is."""

    def __init__(self, path: Path) -> None:
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
        self.metadata: dict[str, str] = metadata
        self._arrays = header

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def array(self, name: str) -> mx.array:
        dtype, shape, begin = self._place(name)
        if not math.prod(shape):
            return mx.zeros(shape, dtype)
        count = math.prod(shape) * int(dtype.size)
        raw = np.memmap(self._path, np.uint8, "r", self._start + begin, (count,))
        return mx.array(raw).view(dtype).reshape(shape)

    def number(self, name: str) -> int:
        """A whole number that is an array of one."""
        dtype, shape, _ = self._place(name)
        if math.prod(shape) != 1 or dtype not in (mx.int32, mx.int64, mx.uint32):
            raise _wrong(f"{name} is no whole number")
        found: Any = self.array(name).item()
        return int(found)

    def text(self, name: str) -> str:
        """A short text that is an array of its characters' numbers."""
        _, shape, _ = self._place(name)
        if len(shape) != 1 or shape[0] > 64:
            raise _wrong(f"{name} is no text")
        found: Any = self.array(name).tolist()
        return bytes(each for each in found if 0 <= each < 128).decode()

    def _place(self, name: str) -> tuple[mx.Dtype, tuple[int, ...], int]:
        """Type, shape and first byte of an array, which lies within the file."""
        match self._arrays.get(name):
            case {"dtype": str() as kind, "shape": list() as shape, "data_offsets": [begin, end]}:
                numbers = [*shape, begin, end]
                if kind not in _DTYPES or len(shape) > _MOST_DIMENSIONS:
                    raise _wrong(f"{name} has a type or a shape that is not known")
                if not all(type(each) is int and each >= 0 for each in numbers):
                    raise _wrong(f"{name} has no shape or no place")
                size_bytes = math.prod(shape) * int(_DTYPES[kind].size)
                if end - begin != size_bytes or end > self._data_bytes:
                    raise _wrong(f"{name} does not lie within the file")
                return _DTYPES[kind], tuple(shape), begin
        raise _wrong(f"{name} is missing")


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
