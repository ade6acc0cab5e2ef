"""GPUs are chosen as llama.cpp chooses them, or as the operator does."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from rekindle.engine.base import EngineOptions
from rekindle.engine.llamacpp import bindings
from rekindle.engine.llamacpp.bindings import load_library
from rekindle.engine.llamacpp.gpus import Distribution, Gpu, distribute, find_gpus
from rekindle.errors import ModelError
from tests.support.tiny import write_llama

CPU, DEDICATED, INTEGRATED, ACCELERATOR = range(4)


class Devices:
    """A list of devices as ggml gives it."""

    def __init__(self, *kinds: int) -> None:
        self._kinds = kinds

    def llama_max_devices(self) -> int:
        return 16

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


THREE = (CPU, DEDICATED, DEDICATED, INTEGRATED, DEDICATED)  # GPUs 0 to 2 are devices 1, 2 and 4


def distributed(**options: Any) -> Distribution:
    return distribute(Devices(*THREE), EngineOptions(path=Path("m.gguf"), **options))


def applied(distribution: Distribution) -> tuple[list[int], list[float]]:
    """The devices and shares that llama.cpp would read."""
    params = bindings.ModelParams()
    distribution.apply(params)
    devices: list[int] = []
    if params.devices:
        pointers = ctypes.cast(params.devices, ctypes.POINTER(ctypes.c_void_p))
        while (handle := pointers[len(devices)]) is not None:
            devices.append(handle)
    shares = ctypes.cast(params.tensor_split, ctypes.POINTER(ctypes.c_float))
    return devices, shares[:16] if params.tensor_split else []


def test_without_a_choice_llama_cpp_decides() -> None:
    assert applied(distributed()) == ([], [])
    assert distributed().fingerprint == ()


def test_only_the_chosen_gpus_are_used_in_the_order_of_the_choice() -> None:
    assert applied(distributed(gpus=(2, 0))) == ([4, 1], [])
    assert [gpu.name for gpu in find_gpus(Devices(*THREE), (2, 0))] == ["device 4", "device 1"]


def test_layers_are_divided_by_the_shares() -> None:
    rest = [0.0] * 13
    assert applied(distributed(gpu_shares=(3.0, 1.0, 0.0))) == ([], [3.0, 1.0, 0.0, *rest])
    assert applied(distributed(gpus=(1, 2), gpu_shares=(3.0, 1.0)))[1][:3] == [3.0, 1.0, 0.0]


def test_state_of_another_distribution_is_not_interchangeable() -> None:
    choices: list[dict[str, Any]] = [
        {},
        {"gpus": (0,)},
        {"gpus": (1,)},
        {"gpu_shares": (1.0, 1.0, 2.0)},
        {"gpu_shares": (2.0, 1.0, 1.0)},
    ]
    assert len({distributed(**options).fingerprint for options in choices}) == len(choices)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gpus": (3,)}, r"no GPU 3: --gpu takes 0 \(device 1\), 1 \(device 2\), 2 \(device 4\)"),
        ({"gpu_shares": (1.0, 1.0)}, "2 numbers for 3 GPUs"),
        ({"gpus": (0,), "gpu_shares": (1.0, 1.0)}, "2 numbers for 1 GPUs"),
        ({"gpus": (0,), "gpu_layers": 0}, "rekindle build-gpu"),
    ],
)
def test_a_choice_that_does_not_fit_the_machine_is_refused(
    options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelError, match=said):
        distributed(**options)


def test_without_a_gpu_the_choice_is_refused_with_the_remedy() -> None:
    with pytest.raises(ModelError, match="rekindle build-gpu"):
        distribute(Devices(CPU), EngineOptions(path=Path("m.gguf"), gpus=(0,)))


def test_the_pinned_library_accepts_the_arrays(tmp_path: Path) -> None:
    """An empty list of devices means the CPU, so this runs on any machine."""
    library = load_library()
    path = str(write_llama(tmp_path / "tiny.gguf")).encode()
    params = library.llama_model_default_params()
    devices = (ctypes.c_void_p * 1)(None)
    split = (ctypes.c_float * library.llama_max_devices())(3.0, 1.0)
    Distribution((), (), devices, split).apply(params)
    model = library.llama_model_load_from_file(path, params)
    assert model
    library.llama_model_free(model)
