"""Checks by its header that a GGUF file is whole, and not damaged, truncated or of another format.

Nothing in the file is trusted: every count and length is bounded before it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

from rekindle.errors import ModelError

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32

UINT32, STRING, ARRAY, UINT64 = 4, 8, 9, 10
FIXED_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, UINT32: 4, 5: 4, 6: 4, 7: 1, UINT64: 8, 11: 8, 12: 8}
UNSIGNED = (0, 2, UINT32, UINT64)

BUFFER_BYTES = 1 << 20  # read at a time
MAX_NAME_BYTES = 65_535
MAX_TEXT_BYTES = 1000  # of a field that is shown; a chat template is longer
MAX_HEADER_BYTES = 256 << 20  # ten times the largest known header
MAX_ITEMS = 4_000_000  # likewise; bounds the time that a malicious file can cost

#: Elements in a block of each tensor type, and bytes of that block, by ggml's type id. The gaps are
#: types that ggml has removed.
BLOCKS: dict[int, tuple[int, int]] = {
    # F32, F16, BF16, F64, I8, I16, I32, I64
    0: (1, 4), 1: (1, 2), 30: (1, 2), 28: (1, 8), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8),
    # Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q8_1
    2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 36),
    # Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, Q8_K
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292),
    # IQ2_XXS, IQ2_XS, IQ3_XXS, IQ1_S, IQ4_NL
    16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18),
    # IQ3_S, IQ2_S, IQ4_XS, IQ1_M
    21: (256, 110), 22: (256, 82), 23: (256, 136), 29: (256, 56),
    # TQ1_0, TQ2_0, MXFP4, NVFP4, Q1_0, Q2_0
    34: (256, 54), 35: (256, 66), 39: (32, 17), 40: (64, 36), 41: (128, 18), 42: (64, 18),
}  # fmt: skip


def check_gguf(path: Path) -> None:
    try:
        if not path.is_file():  # also keeps a pipe from blocking the open
            raise ModelError(f"There is no model file at {path}. Pull the model again.")
        with path.open("rb", buffering=BUFFER_BYTES) as file:
            _check(HeaderReader(file, path.stat().st_size))
    except BrokenHeader as error:
        raise ModelError(
            f"{path} is not a usable GGUF model: {error}. If it was pulled or downloaded, delete "
            "it and fetch it again; otherwise give another file."
        ) from None
    except OSError as error:
        raise ModelError(f"Cannot read {path}: {error.strerror}. Check its permissions.") from error


@dataclass(frozen=True, slots=True)
class GgufSummary:
    """What a header says about its model: short fields by key, and the number of weights."""

    fields: Mapping[str, str | int]
    parameters: int


def summarise_gguf(path: Path) -> GgufSummary:
    """Read the header of a checked file."""
    with path.open("rb", buffering=BUFFER_BYTES) as file:
        header = HeaderReader(file, path.stat().st_size)
        count, tensors = _read_counts(header)
        fields: dict[str, str | int] = {}
        for _ in range(count):
            key = header.string(MAX_NAME_BYTES).decode(errors="replace")
            kind = header.u32()
            if kind == STRING:
                if (length := header.u64()) <= MAX_TEXT_BYTES:
                    fields[key] = header.take(length).decode(errors="replace")
                else:
                    header.skip(length)
            elif kind in UNSIGNED:
                fields[key] = int.from_bytes(header.take(FIXED_BYTES[kind]), "little")
            else:
                _skip_value(header, kind)
        return GgufSummary(fields, sum(_read_tensor_elements(header) for _ in range(tensors)))


def _read_tensor_elements(header: HeaderReader) -> int:
    header.string(MAX_NAME_BYTES)
    shape = [header.u64() for _ in range(header.u32())]
    header.skip(FIXED_BYTES[UINT32] + FIXED_BYTES[UINT64])  # its type and offset
    return prod(shape)


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
            f"{header.file_bytes}, so it is truncated"
        )


def _read_counts(header: HeaderReader) -> tuple[int, int]:
    if header.file_bytes < len(MAGIC) or header.take(len(MAGIC)) != MAGIC:
        raise BrokenHeader("it does not begin with GGUF (another format, or a saved web page?)")
    version = header.u32()
    if version not in (2, 3):
        raise BrokenHeader(f"it has GGUF version {version}; versions 2 and 3 are supported")
    tensors, fields = header.u64(), header.u64()
    if not 0 < fields <= 1 << 16 or tensors > 1 << 17:  # the first file of a split has no tensors
        raise BrokenHeader(f"its header claims {fields} fields and {tensors} tensors")
    return fields, tensors


def _read_field(header: HeaderReader) -> int | None:
    """Skip a field. Returns its value if it is the alignment."""
    key = header.string(MAX_NAME_BYTES)
    kind = header.u32()
    if key != b"general.alignment":
        _skip_value(header, kind)
        return None
    alignment = header.u32() if kind == UINT32 else 0
    if not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
        raise BrokenHeader("its alignment is not a power of two")
    return alignment


def _skip_value(header: HeaderReader, kind: int, nesting: int = 0) -> None:
    if kind in FIXED_BYTES:
        header.skip(FIXED_BYTES[kind])
    elif kind == STRING:
        header.skip_strings(1)
    elif kind == ARRAY and nesting < 4:
        _skip_array(header, nesting + 1)
    else:
        raise BrokenHeader(f"it has a value of unknown type {kind}")


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
    """Return where the next tensor ends, relative to the start of the tensor data."""
    header.string(MAX_NAME_BYTES)
    dimensions = header.u32()
    if dimensions > 4:
        raise BrokenHeader(f"it has a tensor of {dimensions} dimensions")
    shape = [header.u64() for _ in range(dimensions)]
    kind, offset = header.u32(), header.u64()
    if offset % alignment:
        raise BrokenHeader("one of its tensors is not aligned")
    return offset + _tensor_bytes(shape, kind)


def _tensor_bytes(shape: list[int], kind: int) -> int:
    """Return the size of a tensor, or 0 for a newer type, whose size cannot be checked."""
    if kind not in BLOCKS:
        return 0
    block_elements, block_bytes = BLOCKS[kind]
    if shape and shape[0] % block_elements:
        raise BrokenHeader("one of its tensors does not consist of whole blocks")
    return prod(shape) // block_elements * block_bytes


class BrokenHeader(Exception):
    """The message says why."""


class HeaderReader:
    """Reads little-endian fields in order, never past the file or the size limit of headers.

    The file is read and not mapped, because a mapped file that shrinks kills the process.
    """

    def __init__(self, file: BinaryIO, file_bytes: int) -> None:
        self.file_bytes = file_bytes
        self.position = 0
        self._file = file
        self._items = 0

    def require(self, size_bytes: int) -> None:
        """Raise BrokenHeader unless the header can hold this many more bytes."""
        end = self.position + size_bytes
        if end > self.file_bytes:
            raise BrokenHeader("it ends inside its header, so it is truncated or damaged")
        if end > MAX_HEADER_BYTES:
            raise BrokenHeader(f"its header claims more than {MAX_HEADER_BYTES >> 20} MiB")

    def count_items(self, count: int) -> None:
        """Raise BrokenHeader if the header has too many items that are skipped one by one."""
        self._items += count
        if self._items > MAX_ITEMS:
            raise BrokenHeader(f"its header claims more than {MAX_ITEMS} values")

    def skip(self, size_bytes: int) -> None:
        self.require(size_bytes)
        self.position += size_bytes
        self._file.seek(self.position)

    def take(self, size_bytes: int) -> bytes:
        self.require(size_bytes)
        self.position += size_bytes
        found = self._file.read(size_bytes)
        if len(found) < size_bytes:
            raise BrokenHeader("it became shorter while it was read")
        return found

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def string(self, limit_bytes: int) -> bytes:
        length = self.u64()
        if length > limit_bytes:
            raise BrokenHeader(f"it has a name of {length} bytes")
        return self.take(length)

    def skip_strings(self, count: int) -> None:
        for _ in range(count):
            self.skip(self.u64())
