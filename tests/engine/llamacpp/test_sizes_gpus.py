"""GPUs are chosen as llama.cpp chooses them."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from rekindle.engine.llamacpp.bindings import load_library
from rekindle.engine.llamacpp.sizes import Gpu, find_gpus

CPU, DEDICATED, INTEGRATED, ACCELERATOR = range(4)


class Devices:
    """A list of devices as ggml gives it."""

    def __init__(self, *kinds: int) -> None:
        self._kinds = kinds

    def ggml_backend_dev_count(self) -> int:
        return len(self._kinds)

    def ggml_backend_dev_get(self, number: int) -> int:
        return number

    def ggml_backend_dev_type(self, device: int) -> int:
        return self._kinds[device]

    def ggml_backend_dev_description(self, device: int) -> bytes:
        return b"device %d" % device

    def ggml_backend_dev_memory(self, device: int, free: Any, total: Any) -> None:
        for pointer, size in ((free, 10), (total, 20)):
            ctypes.cast(pointer, ctypes.POINTER(ctypes.c_size_t))[0] = device * 100 + size


@pytest.mark.parametrize(
    ("kinds", "found"),
    [
        ((CPU, ACCELERATOR), []),
        ((CPU, INTEGRATED), [1]),
        ((INTEGRATED, DEDICATED, CPU, DEDICATED), [1, 3]),
    ],
)
def test_integrated_gpus_count_only_if_there_are_no_others(
    kinds: tuple[int, ...], found: list[int]
) -> None:
    expected = [Gpu(f"device {each}", each * 100 + 10, each * 100 + 20) for each in found]
    assert find_gpus(Devices(*kinds)) == expected


def test_the_pinned_library_lists_its_gpus() -> None:
    for gpu in find_gpus(load_library()):
        assert 0 <= gpu.free_bytes <= gpu.total_bytes
