"""The memory of a native context: cells, by the slot that holds them, and their state as bytes."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from rekindle.buffers import Allocate, plain_memory
from rekindle.engine.base import Blob
from rekindle.engine.llamacpp import bindings
from rekindle.errors import EngineBroken


class Memory:
    """By positions, as llama.cpp counts them. `flags` say which state is meant."""

    def __init__(self, library: Any, native: int) -> None:
        self._library = library
        self._native = native
        self._memory = library.llama_get_memory(native)

    def clear(self) -> None:
        """Empty it; cells are filled from the first one on again."""
        self._library.llama_memory_clear(self._memory, False)

    def copy(self, source: int, into: int, first: int = -1, stop: int = -1) -> None:
        """Let another slot hold the same cells; -1: from the beginning, to the end."""
        self._library.llama_memory_seq_cp(self._memory, source, into, first, stop)

    def remove(self, slot: int, first: int = -1) -> bool:
        """What a slot holds from a position on; False: llama.cpp refuses."""
        return bool(self._library.llama_memory_seq_rm(self._memory, slot, first, -1))

    def span(self, slot: int) -> tuple[int, int]:
        """The first and the last position that a slot holds."""
        return (
            self._library.llama_memory_seq_pos_min(self._memory, slot),
            self._library.llama_memory_seq_pos_max(self._memory, slot),
        )

    def read(self, slot: int, flags: int, allocate: Allocate = plain_memory) -> memoryview:
        size = self._library.llama_state_seq_get_size_ext(self._native, slot, flags)
        state = allocate(size)
        into = _address(state)
        written = self._library.llama_state_seq_get_data_ext(self._native, into, size, slot, flags)
        if written != size:
            raise EngineBroken(f"llama.cpp exported {written} of {size} bytes")
        return state

    def snapshot(self, slot: int, most_bytes: int) -> bytes:
        """Copy a slot's cells to memory of the device that the slot keeps; what it takes to have
        them back, which fits into so many bytes: to ask how many takes half as long as copying."""
        flags, into = bindings.STATE_ON_DEVICE, plain_memory(most_bytes)
        written = self._library.llama_state_seq_get_data_ext(
            self._native, _address(into), most_bytes, slot, flags
        )
        return bytes(into[:written]) if written else bytes(self.read(slot, flags))

    def write(self, slot: int, blob: Blob, flags: int) -> None:
        """Instead of what the slot holds."""
        source, size = _address(blob), len(blob)
        read = self._library.llama_state_seq_set_data_ext(self._native, source, size, slot, flags)
        if read != size:
            raise EngineBroken("llama.cpp rejected a block")


def _address(memory: Blob) -> Any:
    return np.frombuffer(memory, np.uint8).ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
