"""Files that other programs exchange state in, as the runtime knows them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Protocol

Blob = bytes | bytearray | memoryview  # the state of a block, as bytes


class StateWriter(Protocol):
    """A file in the making."""

    def append(self, blob: Blob, tokens: int, *, resumable: bool = False) -> None:
        """The next block; the last one is resumable where state cannot be truncated. Raises
        CorruptBlock."""

    def save(self, path: Path, tokens: Seq[int]) -> None:
        """Write the state of these tokens, which are all that was appended, or, where state can be
        truncated, the first of them."""


class ReadState(Protocol):
    """The state in a file, and the tokens it is of."""

    @property
    def tokens(self) -> list[int]: ...

    def export(self, start: int, stop: int, *, resumable: bool = False) -> bytes:
        """A block of it; `resumable` at its end alone. Raises NoMemory."""


class StateFiles(Protocol):
    """Files that other programs exchange state of the usual KV type in."""

    @property
    def suffix(self) -> str:
        """How their names end."""

    def writer(self) -> StateWriter: ...

    def read(self, path: Path) -> ReadState:
        """Raises BadRequest for what is not state of this model."""
