"""How much memory there is for KV state."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

from rekindle.engine.llamacpp import bindings


def host_free_bytes() -> int:
    """Memory a new process can have without swapping."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    # Elsewhere only the total is known; half of it is a cautious guess.
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def gpu_free_bytes(library: Any) -> int:
    """Free memory of all GPUs together, after the weights are loaded."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    found = 0
    for index in range(library.ggml_backend_dev_count()):
        device = library.ggml_backend_dev_get(index)
        if library.ggml_backend_dev_type(device) == bindings.DEVICE_GPU:
            library.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
            found += free.value
    return found
