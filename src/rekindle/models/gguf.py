"""Validates a GGUF file by its header alone: whole, or foreign, damaged or truncated.

Nothing in the file is trusted: every count and length is bounded before it is used.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import BinaryIO

from rekindle.errors import ModelError

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

WINDOW_BYTES = 1 << 20
MAX_HEADER_BYTES = 256 << 20  # ten times the largest seen
MAX_ITEMS = 4_000_000  # likewise; bounds the seconds that a malicious file can cost

#: How ggml packs each tensor type: elements in a block, and bytes of that block, by ggml's type id.
#: The gaps are types that ggml has removed.
BLOCKS: dict[int, tuple[int, int]] = {
    0: (1, 4),  # F32
    1: (1, 2),  # F16
    2: (32, 18),  # Q4_0
    3: (32, 20),  # Q4_1
    6: (32, 22),  # Q5_0
    7: (32, 24),  # Q5_1
    8: (32, 34),  # Q8_0
    9: (32, 36),  # Q8_1
    10: (256, 84),  # Q2_K
    11: (256, 110),  # Q3_K
    12: (256, 144),  # Q4_K
    13: (256, 176),  # Q5_K
    14: (256, 210),  # Q6_K
    15: (256, 292),  # Q8_K
    16: (256, 66),  # IQ2_XXS
    17: (256, 74),  # IQ2_XS
    18: (256, 98),  # IQ3_XXS
    19: (256, 50),  # IQ1_S
    20: (32, 18),  # IQ4_NL
    21: (256, 110),  # IQ3_S
    22: (256, 82),  # IQ2_S
    23: (256, 136),  # IQ4_XS
    24: (1, 1),  # I8
    25: (1, 2),  # I16
    26: (1, 4),  # I32
    27: (1, 8),  # I64
    28: (1, 8),  # F64
    29: (256, 56),  # IQ1_M
    30: (1, 2),  # BF16
    34: (256, 54),  # TQ1_0
    35: (256, 66),  # TQ2_0
    39: (32, 17),  # MXFP4
    40: (64, 36),  # NVFP4
    41: (128, 18),  # Q1_0
    42: (64, 18),  # Q2_0
}


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


class BrokenHeader(Exception):
    """The bytes are not a header; the message says why, after "it is not usable:"."""


class HeaderReader:
    """Little-endian fields in order; never reads past the file or the largest header allowed.

    The file is read, not mapped: a file that shrinks under a mapping kills the process.
    """

    def __init__(self, file: BinaryIO, file_bytes: int) -> None:
        self.file_bytes = file_bytes
        self.position = 0
        self._file = file
        self._items = 0
        self._window = b""
        self._window_start = 0

    def require(self, size_bytes: int) -> None:
        """Raise BrokenHeader unless the header can hold this many more bytes."""
        end = self.position + size_bytes
        if end > self.file_bytes:
            raise BrokenHeader("it ends inside its own header, so it was cut short or damaged")
        if end > MAX_HEADER_BYTES:
            raise BrokenHeader(f"its header claims more than {MAX_HEADER_BYTES >> 20} MiB")

    def count_items(self, count: int) -> None:
        """Raise BrokenHeader when the header holds more items to pass one by one than allowed."""
        self._items += count
        if self._items > MAX_ITEMS:
            raise BrokenHeader(f"its header claims more than {MAX_ITEMS} values")

    def skip(self, size_bytes: int) -> None:
        self.require(size_bytes)
        self.position += size_bytes

    def take(self, size_bytes: int) -> bytes:
        self.require(size_bytes)
        start = self.position - self._window_start
        if start + size_bytes > len(self._window):
            self._load(size_bytes)
            start = 0
        self.position += size_bytes
        return self._window[start : start + size_bytes]

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def string(self, limit_bytes: int) -> bytes:
        length = self.u64()
        if length > limit_bytes:
            raise BrokenHeader(f"it holds a name of {length} bytes")
        return self.take(length)

    def skip_strings(self, count: int) -> None:
        for _ in range(count):
            self.skip(self.u64())

    def _load(self, size_bytes: int) -> None:
        self._file.seek(self.position)
        self._window = self._file.read(max(size_bytes, WINDOW_BYTES))
        self._window_start = self.position
        if len(self._window) < size_bytes:
            raise BrokenHeader("it became shorter while it was read")
