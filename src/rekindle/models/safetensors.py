"""Reads and checks the header of a safetensors file.

Nothing in the file is trusted: every count and length is bounded before it is used.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from rekindle.errors import ModelError

MAX_HEADER_BYTES = 100 << 20  # the limit of the format's own library
LENGTH_BYTES = 8
METADATA = "__metadata__"

#: Bits of an element, by the name of its type.
ELEMENT_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


class InvalidSafetensors(Exception):
    """The file is damaged, truncated or of another format. The message says why."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    dtype: str  # a key of ELEMENT_BITS
    shape: tuple[int, ...]
    start: int  # offset of the first byte in the file
    size_bytes: int


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    tensors: dict[str, TensorInfo]  # they do not overlap, and are inside the file
    metadata: dict[str, Any]  # as written: programs also write null, or values of other types


def tensor_names(path: Path) -> list[str]:
    """Return the names of the tensors in a model file; raises ModelError if it is not whole."""
    try:
        if not path.is_file():  # also keeps a pipe from blocking the open
            raise ModelError(f"There is no model file at {path}. Pull the model again.")
        return list(read_header(path).tensors)
    except InvalidSafetensors as error:
        raise ModelError(
            f"{path} is not a usable safetensors file: {error}. If it was pulled or downloaded, "
            "delete it and fetch it again; otherwise give another model."
        ) from None
    except OSError as error:
        raise ModelError(f"Cannot read {path}: {error.strerror}. Check its permissions.") from error


def read_header(path: Path, max_header_bytes: int = MAX_HEADER_BYTES) -> SafetensorsHeader:
    """Read the header of a file; raises InvalidSafetensors."""
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(LENGTH_BYTES)
        if start and b"version https://git-lfs".startswith(start):
            raise InvalidSafetensors("it is a Git LFS pointer, not the file itself (git lfs pull)")
        header_bytes = int.from_bytes(start, "little")
        if len(start) < LENGTH_BYTES or header_bytes > min(max_header_bytes, file_bytes):
            raise InvalidSafetensors("its header is longer than the file or than the limit")
        header = _parse(file.read(header_bytes))
    metadata = header.pop(METADATA, None)
    data_start = LENGTH_BYTES + header_bytes
    tensors = {name: _tensor(each, data_start, file_bytes) for name, each in header.items()}
    stop = 0
    for tensor in sorted(tensors.values(), key=lambda each: (each.start, each.size_bytes)):
        if tensor.start < stop:
            raise InvalidSafetensors("its tensors overlap")
        stop = tensor.start + tensor.size_bytes
    return SafetensorsHeader(tensors, metadata if isinstance(metadata, dict) else {})


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError):
        raise InvalidSafetensors("its header is not JSON") from None
    if not isinstance(header, dict):
        raise InvalidSafetensors("its header is not a JSON object")
    return header


def _tensor(entry: Any, data_start: int, file_bytes: int) -> TensorInfo:
    if not isinstance(entry, dict):
        raise InvalidSafetensors("one of its tensors is not described")
    shape: Any
    offsets: Any
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise InvalidSafetensors("one of its tensors has no shape or no offsets")
    start, stop = offsets
    if not start <= stop <= file_bytes - data_start or len(shape) > 8:
        raise InvalidSafetensors("its tensors reach beyond its end: it is truncated or damaged")
    dtype = str(entry.get("dtype"))
    bits = ELEMENT_BITS.get(dtype)
    if bits is None:
        raise InvalidSafetensors("one of its tensors has an unknown type")
    if prod(shape) * bits != (stop - start) * 8:
        raise InvalidSafetensors("one of its tensors is not as large as its shape says")
    return TensorInfo(dtype, tuple(shape), data_start + start, stop - start)


def _are_counts(numbers: Any) -> bool:
    return isinstance(numbers, list) and all(
        type(number) is int and 0 <= number < 1 << 63 for number in numbers
    )
