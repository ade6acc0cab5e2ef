"""Validates a safetensors file by its header alone: whole, or foreign, damaged or truncated.

Nothing in the file is trusted: every count and length is bounded before it is used.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

from rekindle.errors import ModelError

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100 << 20  # what the format's own library takes
MAX_DIMENSIONS = 8
METADATA = "__metadata__"
LFS_POINTER = b"version https://git-lfs"

#: Bits of an element, by the name of its type.
ELEMENT_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


def tensor_names(path: Path) -> list[str]:
    """The tensors of a whole file; raises ModelError for anything else."""
    try:
        if not path.is_file():  # also keeps a pipe from blocking the open
            raise ModelError(f"There is no model file at {path}. Pull the model again.")
        return _read_names(path)
    except _Broken as error:
        raise ModelError(
            f"{path} is not a usable safetensors file: {error}. If it was pulled or downloaded, "
            "delete it and fetch it again; otherwise give another model."
        ) from None
    except OSError as error:
        raise ModelError(f"Cannot read {path}: {error.strerror}. Check its permissions.") from error


def _read_names(path: Path) -> list[str]:
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(LENGTH_BYTES)
        if LFS_POINTER.startswith(start[:LENGTH_BYTES]) and start:
            raise _Broken("it is a pointer of Git LFS, not the file itself (git lfs pull)")
        header_bytes = int.from_bytes(start, "little")
        if len(start) < LENGTH_BYTES or header_bytes > min(MAX_HEADER_BYTES, file_bytes):
            raise _Broken("its header is longer than the file or than any known one")
        header = _parse(file.read(header_bytes))
    data_bytes = file_bytes - LENGTH_BYTES - header_bytes
    for name, about in header.items():
        if name != METADATA:
            _check_tensor(about, data_bytes)
    return [name for name in header if name != METADATA]


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError):
        raise _Broken("its header is not JSON") from None
    if not isinstance(header, dict):
        raise _Broken("its header is no list of tensors")
    return header


def _check_tensor(about: Any, data_bytes: int) -> None:
    if not isinstance(about, dict):
        raise _Broken("one of its tensors is not described")
    shape: Any
    place: Any
    shape, place = about.get("shape"), about.get("data_offsets")
    if not _are_counts(shape) or not _are_counts(place) or len(place) != 2:
        raise _Broken("one of its tensors has no shape or no place")
    start, stop = place
    if not start <= stop <= data_bytes or len(shape) > MAX_DIMENSIONS:
        raise _Broken("its tensors reach beyond its end, so it was cut short or damaged")
    bits = ELEMENT_BITS.get(str(about.get("dtype")))
    if bits is None:
        raise _Broken("one of its tensors has an unknown type")
    if prod(shape) * bits != (stop - start) * 8:
        raise _Broken("one of its tensors is not as large as its shape says")


def _are_counts(numbers: Any) -> bool:
    return isinstance(numbers, list) and all(
        type(number) is int and 0 <= number < 1 << 63 for number in numbers
    )


class _Broken(Exception):
    """The bytes are no safetensors file; the message says why."""
