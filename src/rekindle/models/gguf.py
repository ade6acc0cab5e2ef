"""Tells a whole GGUF file from a foreign, damaged or truncated one by its header alone."""

from __future__ import annotations

from math import prod
from pathlib import Path

from rekindle.errors import ModelError
from rekindle.models.header import BrokenHeader, HeaderReader
from rekindle.models.tensor_types import BLOCKS

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

MAX_FIELDS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_NAME_BYTES = 65_535
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 20
MAX_NESTING = 4

UINT32, STRING, ARRAY = 4, 8, 9
FIXED_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, UINT32: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def check_gguf(path: Path) -> None:
    """Return for a whole GGUF file; raise ModelError for anything else."""
    try:
        if not path.is_file():  # also keeps a pipe from blocking the open
            raise ModelError(f"There is no model file at {path}. Pull the model again.")
        with path.open("rb") as file:
            _check(HeaderReader(file, path.stat().st_size))
    except BrokenHeader as error:
        raise ModelError(
            f"{path} is not a usable GGUF model: {error}. If it was pulled or downloaded, delete "
            "it and fetch it again; otherwise give another file."
        ) from None
    except OSError as error:
        raise ModelError(f"Cannot read {path}: {error.strerror}. Check its permissions.") from error


def _check(header: HeaderReader) -> None:
    fields, tensors = _read_counts(header)
    alignment = DEFAULT_ALIGNMENT
    for _ in range(fields):
        alignment = _read_field(header) or alignment
    data_bytes = max((_read_tensor_end(header, alignment) for _ in range(tensors)), default=0)
    data_start = -(-header.position // alignment) * alignment
    if data_bytes and data_start + data_bytes > header.file_bytes:
        raise BrokenHeader(
            f"its tensors need {data_start + data_bytes} bytes and the file has "
            f"{header.file_bytes}, so it was cut short"
        )


def _read_counts(header: HeaderReader) -> tuple[int, int]:
    if header.file_bytes < len(MAGIC) or header.take(len(MAGIC)) != MAGIC:
        raise BrokenHeader("it does not begin with GGUF (another format, or a saved web page?)")
    version = header.u32()
    if version not in VERSIONS:
        raise BrokenHeader(f"it is of GGUF version {version}; versions 2 and 3 are supported")
    tensors, fields = header.u64(), header.u64()
    if not 0 < fields <= MAX_FIELDS or tensors > MAX_TENSORS:  # a split's first file has no tensors
        raise BrokenHeader(f"its header claims {fields} fields and {tensors} tensors")
    return fields, tensors


def _read_field(header: HeaderReader) -> int | None:
    """Pass over one field; its value when it is the alignment."""
    key = header.string(MAX_NAME_BYTES)
    kind = header.u32()
    if key != b"general.alignment":
        _skip_value(header, kind)
        return None
    alignment = header.u32() if kind == UINT32 else 0
    if not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise BrokenHeader("its alignment is not a power of two")
    return alignment


def _skip_value(header: HeaderReader, kind: int, nesting: int = 0) -> None:
    if kind in FIXED_BYTES:
        header.skip(FIXED_BYTES[kind])
    elif kind == STRING:
        header.skip_strings(1)
    elif kind == ARRAY and nesting < MAX_NESTING:
        _skip_array(header, nesting + 1)
    else:
        raise BrokenHeader(f"it holds a value of unknown type {kind}")


def _skip_array(header: HeaderReader, nesting: int) -> None:
    kind, count = header.u32(), header.u64()
    if kind in FIXED_BYTES:
        header.skip(count * FIXED_BYTES[kind])
        return
    header.count_items(count)
    if kind == STRING:
        header.skip_strings(count)
        return
    for _ in range(count):
        _skip_value(header, kind, nesting)


def _read_tensor_end(header: HeaderReader, alignment: int) -> int:
    """Where the next tensor must end, counted from the start of the tensor data."""
    header.string(MAX_NAME_BYTES)
    dimensions = header.u32()
    if dimensions > MAX_DIMENSIONS:
        raise BrokenHeader(f"it holds a tensor of {dimensions} dimensions")
    shape = [header.u64() for _ in range(dimensions)]
    kind, offset = header.u32(), header.u64()
    if offset % alignment:
        raise BrokenHeader("one of its tensors is not aligned")
    return offset + _tensor_bytes(shape, kind)


def _tensor_bytes(shape: list[int], kind: int) -> int:
    """The tensor's size; 0 for a type newer than this table, whose size cannot be checked."""
    if kind not in BLOCKS:
        return 0
    block_elements, block_bytes = BLOCKS[kind]
    if shape and shape[0] % block_elements:
        raise BrokenHeader("one of its tensors is not made of whole blocks")
    return prod(shape) // block_elements * block_bytes
