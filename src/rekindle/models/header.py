"""A bounded reader over the head of a file nobody vouches for."""

from __future__ import annotations

from typing import BinaryIO

WINDOW_BYTES = 1 << 20
MAX_HEADER_BYTES = 256 << 20  # ten times the largest seen
MAX_ITEMS = 4_000_000  # likewise; bounds the seconds that a malicious file can cost


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
