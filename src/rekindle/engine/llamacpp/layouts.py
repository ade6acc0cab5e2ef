"""What blocks of each KV type look like, and blocks of one type as blocks of another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rekindle.engine.base import Blob, KvType
from rekindle.engine.llamacpp.state import StateLayout, Transcoder
from rekindle.errors import ModelError, NoMemory, Unsupported

BITS: dict[KvType, int] = {"f16": 16, "q8_0": 8, "q4_0": 4}


class Layouts:
    """Sizes are known of every type; rotations, which only state of the type itself shows, of the
    usual one, and of others when they are first needed."""

    def __init__(
        self,
        library: Any,
        sizes: Mapping[KvType, StateLayout],
        usual: KvType,
        measure: Callable[[KvType], StateLayout],
    ) -> None:
        self._library = library
        self._sizes = sizes
        self._measure = measure
        self._measured = {usual: sizes[usual]}

    def __getitem__(self, kv_type: KvType) -> StateLayout:
        """The sizes of a type."""
        return self._sizes[kv_type]

    def transcode(
        self, blob: Blob, tokens: int, source: KvType, target: KvType, *, resumable: bool
    ) -> bytes:
        if BITS[target] >= BITS[source]:
            raise ValueError(f"{target} cells hold no less than {source} cells")
        layouts = self.measured(source), self.measured(target)
        return Transcoder(self._library, *layouts).transcode(blob, tokens, resumable=resumable)

    def measured(self, kv_type: KvType) -> StateLayout:
        """The layout of a type with its rotations; raises NoMemory."""
        if kv_type not in self._measured:
            try:
                found = self._measure(kv_type)
            except ModelError:
                raise NoMemory.for_kv_type(needed_bytes=1) from None
            known = self._sizes[kv_type]
            if (found.fixed, found.each) != (known.fixed, known.each):
                raise Unsupported(f"llama.cpp lays {kv_type} cells out in an unknown way.")
            self._measured[kv_type] = found
        return self._measured[kv_type]
