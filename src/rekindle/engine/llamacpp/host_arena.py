"""Hands out page-locked memory for blocks on their way to and from a GPU.

The bus copies page-locked memory several times faster than ordinary memory. Locking takes half a
second per gigabyte and keeps the driver busy, so it happens while the weights are loaded. A block
that does not fit gets ordinary memory.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import weakref
from collections import deque
from functools import cache
from typing import Any

from rekindle.engine.llamacpp import bindings
from rekindle.memory import host_free_bytes, plain_memory

log = logging.getLogger("rekindle.engine")

SLAB_BYTES = 1 << 30
GRAIN_BYTES = 4096  # sizes are rounded up to a multiple


class _Slab:
    """A range of locked memory with a list of its free runs."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.address = address
        self._free = [(0, size_bytes)]  # (start, size), in order

    def take(self, size_bytes: int) -> int | None:
        for number, (start, free_bytes) in enumerate(self._free):
            if free_bytes >= size_bytes:
                rest = (start + size_bytes, free_bytes - size_bytes)
                self._free[number : number + 1] = [rest] if rest[1] else []
                return start
        return None

    def give_back(self, start: int, size_bytes: int) -> None:
        runs: list[tuple[int, int]] = []
        for run in sorted([*self._free, (start, size_bytes)]):
            if runs and sum(runs[-1]) == run[0]:
                runs[-1] = (runs[-1][0], runs[-1][1] + run[1])
            else:
                runs.append(run)
        self._free = runs


class HostArena:
    """Allocates for any thread. Memory returns when nothing refers to it any more.

    Locked memory is released when the process ends, because blocks may outlive the engine.
    """

    def __init__(self, library: Any, buffer_type: int, limit_bytes: int) -> None:
        self._library = library
        self._buffer_type = buffer_type
        self._slab_bytes = min(SLAB_BYTES, limit_bytes)
        self._slabs: list[_Slab] = []
        self._lock = threading.Lock()
        self._returned: deque[tuple[_Slab, int, int]] = deque()  # by finalizers
        self._locking = threading.Thread(
            target=self._lock_slabs, args=(limit_bytes,), name="page-locking", daemon=True
        )
        self._locking.start()

    def _lock_slabs(self, limit_bytes: int) -> None:
        for locked_bytes in range(0, limit_bytes - self._slab_bytes + 1, self._slab_bytes):
            slab = self._lock_slab()
            if slab is None:
                log.warning(
                    "only %d of %d MB of the RAM cache could be page-locked; the rest is restored "
                    "several times slower (raise `ulimit -l`, or lower --ram-cache)",
                    locked_bytes // 10**6,
                    limit_bytes // 10**6,
                )
                return
            with self._lock:
                self._slabs.append(slab)

    def _lock_slab(self) -> _Slab | None:
        library, size_bytes = self._library, self._slab_bytes
        buffer = library.ggml_backend_buft_alloc_buffer(self._buffer_type, size_bytes)
        if not buffer:
            return None
        if library.ggml_backend_buffer_get_type(buffer) != self._buffer_type:
            library.ggml_backend_buffer_free(buffer)  # llama.cpp fell back to ordinary memory
            return None
        return _Slab(library.ggml_backend_buffer_get_base(buffer), size_bytes)

    def wait_until_locked(self) -> None:
        self._locking.join()

    def allocate(self, size_bytes: int) -> memoryview:
        taken_bytes = -(-size_bytes // GRAIN_BYTES) * GRAIN_BYTES
        with self._lock:
            while self._returned:
                slab, start, returned_bytes = self._returned.popleft()
                slab.give_back(start, returned_bytes)
            for slab in self._slabs:
                at = slab.take(taken_bytes)
                if at is not None:
                    memory = (ctypes.c_uint8 * size_bytes).from_address(slab.address + at)
                    weakref.finalize(memory, self._returned.append, (slab, at, taken_bytes))
                    return memoryview(memory).cast("B")
        return plain_memory(size_bytes)


@cache
def lock_memory(library: Any, limit_bytes: int) -> HostArena | None:
    """Start to lock memory for blocks if a device benefits from it.

    Cached for the process: a model may be loaded a second time, without its projector.
    """
    # The system cannot reclaim locked memory, so leave a quarter of the free memory.
    limit_bytes = min(limit_bytes, int(0.75 * host_free_bytes()))
    for index in range(library.ggml_backend_dev_count()):
        device = library.ggml_backend_dev_get(index)
        if library.ggml_backend_dev_type(device) == bindings.DEVICE_GPU:
            buffer_type = library.ggml_backend_dev_host_buffer_type(device)
            if buffer_type and limit_bytes:
                return HostArena(library, buffer_type, limit_bytes)
    return None
