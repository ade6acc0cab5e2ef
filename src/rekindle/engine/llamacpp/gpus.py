"""Finds the GPUs that llama.cpp can use, and distributes a model over the chosen ones."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rekindle.engine.base import EngineOptions
from rekindle.engine.llamacpp import bindings
from rekindle.errors import ModelError


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    free_bytes: int
    total_bytes: int


def _devices(library: Any) -> list[int]:
    """The GPUs that llama.cpp uses: integrated ones only if there are no others."""
    devices = [library.ggml_backend_dev_get(n) for n in range(library.ggml_backend_dev_count())]
    for kind in (bindings.DEVICE_GPU, bindings.DEVICE_INTEGRATED_GPU):
        if found := [each for each in devices if library.ggml_backend_dev_type(each) == kind]:
            return found
    return []


def find_gpus(library: Any, chosen: Sequence[int] = ()) -> list[Gpu]:
    """List the GPUs with these numbers, or all of them."""
    devices = _devices(library)
    return [_read(library, devices[n]) for n in chosen or range(len(devices))]


def _read(library: Any, device: int) -> Gpu:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    library.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
    name = library.ggml_backend_dev_description(device).decode(errors="replace")
    return Gpu(name, free.value, total.value)


@dataclass(frozen=True, slots=True)
class Distribution:
    """The GPUs of a model, and how its layers are divided among them.

    llama.cpp borrows the arrays while it loads, so this object has to live as long.
    """

    chosen: tuple[int, ...] = ()  # numbers of GPUs; none: all of them
    shares: tuple[float, ...] = ()  # of the layers; none: by free memory
    devices: Any = field(default=None, repr=False)  # ended by a null pointer
    split: Any = field(default=None, repr=False)  # one share for each possible device

    def apply(self, params: bindings.ModelParams) -> None:
        if self.devices is not None:
            params.devices = ctypes.cast(self.devices, ctypes.c_void_p)
        if self.split is not None:
            params.tensor_split = ctypes.cast(self.split, ctypes.c_void_p)

    @property
    def fingerprint(self) -> tuple[str, ...]:
        """What tells this distribution from the default. Another device computes other bits."""
        chosen = [f"GPUs {','.join(map(str, self.chosen))}"] if self.chosen else []
        shares = [f"shares {','.join(map(str, self.shares))}"] if self.shares else []
        return (*chosen, *shares)


def distribute(library: Any, options: EngineOptions) -> Distribution:
    """Check the options against the GPUs of this machine. Raises ModelError."""
    if not options.gpus and not options.gpu_shares:
        return Distribution()
    devices = _devices(library)
    if not devices or options.gpu_layers == 0:
        raise ModelError(
            "--gpu and --tensor-split need a GPU that llama.cpp can use: run `rekindle build-gpu`, "
            "and leave --gpu-layers 0 out"
        )
    if wrong := [number for number in options.gpus if number >= len(devices)]:
        names = [f"{n} ({gpu.name})" for n, gpu in enumerate(find_gpus(library))]
        raise ModelError(f"there is no GPU {wrong[0]}: --gpu takes {', '.join(names)}")
    count = len(options.gpus or devices)
    if options.gpu_shares and len(options.gpu_shares) != count:
        raise ModelError(
            f"--tensor-split has {len(options.gpu_shares)} numbers for {count} GPUs: give one "
            "number for each"
        )
    handles = [devices[number] for number in options.gpus]
    split = _floats(options.gpu_shares, int(library.llama_max_devices()))
    return Distribution(
        options.gpus,
        options.gpu_shares,
        _pointers(handles) if handles else None,
        split if options.gpu_shares else None,
    )


def _pointers(handles: Sequence[int]) -> Any:
    return (ctypes.c_void_p * (len(handles) + 1))(*handles, None)


def _floats(shares: Sequence[float], size: int) -> Any:
    """llama.cpp reads a share for as many devices as it could have."""
    return (ctypes.c_float * size)(*shares)
