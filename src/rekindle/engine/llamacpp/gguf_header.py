"""The header of a GGUF file as llama.cpp reads it, before the model is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rekindle.engine.llamacpp import bindings


@dataclass(frozen=True, slots=True)
class TensorPlace:
    kind: int  # ggml's type
    offset_bytes: int
    size_bytes: int


class GgufHeader:
    """Answers for what is there and of the right type; a file that cannot be read has nothing."""

    def __init__(self, library: Any, native: int | None) -> None:
        self._library = library
        self._native = native

    def number(self, key: str) -> int:
        """An unsigned 32-bit value; 0 when there is none."""
        index = self._find(key, bindings.GGUF_UINT32)
        return 0 if index is None else int(self._library.gguf_get_val_u32(self._native, index))

    def real(self, key: str) -> float:
        """A 32-bit float; 0 when there is none."""
        index = self._find(key, bindings.GGUF_FLOAT32)
        return 0.0 if index is None else float(self._library.gguf_get_val_f32(self._native, index))

    def text(self, key: str) -> str:
        """A text; empty when there is none."""
        index = self._find(key, bindings.GGUF_STRING)
        if index is None:
            return ""
        value: bytes = self._library.gguf_get_val_str(self._native, index)
        return value.decode(errors="replace")

    def has_tensor(self, name: str) -> bool:
        if not self._native:
            return False
        return bool(self._library.gguf_find_tensor(self._native, name.encode()) >= 0)

    def place(self, name: str) -> TensorPlace | None:
        """Where a tensor lies in the file; None: it is not there."""
        if not self.has_tensor(name):
            return None
        index = self._library.gguf_find_tensor(self._native, name.encode())
        start = self._library.gguf_get_data_offset(self._native)
        return TensorPlace(
            kind=int(self._library.gguf_get_tensor_type(self._native, index)),
            offset_bytes=start + self._library.gguf_get_tensor_offset(self._native, index),
            size_bytes=int(self._library.gguf_get_tensor_size(self._native, index)),
        )

    def _find(self, key: str, kind: int) -> int | None:
        """Where the key is; ggml ends the process when a value is read as another type."""
        if not self._native:
            return None
        index = int(self._library.gguf_find_key(self._native, key.encode()))
        if index < 0 or self._library.gguf_get_kv_type(self._native, index) != kind:
            return None
        return index


@contextmanager
def open_header(library: Any, path: Path) -> Iterator[GgufHeader]:
    native = library.gguf_init_from_file(str(path).encode(), bindings.GgufInitParams(True, None))
    try:
        yield GgufHeader(library, native)
    finally:
        if native:
            library.gguf_free(native)
