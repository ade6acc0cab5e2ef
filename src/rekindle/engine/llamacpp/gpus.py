"""The GPUs that llama.cpp was built for and has found."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from rekindle.engine.llamacpp import bindings


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    free_bytes: int
    total_bytes: int


def find_gpus(library: Any) -> list[Gpu]:
    """As llama.cpp chooses: integrated ones only where there are no others."""
    devices = [library.ggml_backend_dev_get(n) for n in range(library.ggml_backend_dev_count())]
    for kind in (bindings.DEVICE_GPU, bindings.DEVICE_INTEGRATED_GPU):
        if found := [each for each in devices if library.ggml_backend_dev_type(each) == kind]:
            return [_read(library, each) for each in found]
    return []


def _read(library: Any, device: int) -> Gpu:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    library.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
    name = library.ggml_backend_dev_description(device).decode(errors="replace")
    return Gpu(name, free.value, total.value)
