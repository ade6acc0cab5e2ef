"""Chooses the device, and how much of its memory KV state may take."""

from __future__ import annotations

import sys
from typing import Literal

import mlx.core as mx

from rekindle.engine.base import Capabilities, EngineOptions, KvType
from rekindle.engine.base import Device as Gpu
from rekindle.engine.mlx.layouts import Layouts
from rekindle.engine.mlx.model import LoadedModel
from rekindle.engine.mlx.sequences import context_bytes
from rekindle.errors import ModelError
from rekindle.memory import host_free_bytes

IDLE_SEQUENCES = 32  # idle conversations that may stay on the device

Device = Literal["cpu", "gpu"]


def check_gpus(options: EngineOptions) -> None:
    """Refuse settings for several GPUs, of which MLX uses one."""
    if options.gpus or options.gpu_shares:
        raise ModelError("--gpu and --tensor-split are for GGUF models; MLX has one GPU")


def choose_device(gpu_layers: int | None) -> Device:
    """Return the default device of MLX, or the CPU if no layer may be on a GPU."""
    if gpu_layers == 0:
        mx.set_default_device(mx.Device(mx.cpu))
    return "gpu" if mx.default_device().type == mx.gpu else "cpu"


def is_cuda(device: Device) -> bool:
    """Whether MLX computes on an NVIDIA GPU. There equal steps do not give equal bits, and MLX
    cannot compute attention over quantised KV cells."""
    return device == "gpu" and not mx.metal.is_available()


def free_bytes(device: Device) -> int:
    if device == "gpu":
        limit = working_set_bytes()
        if limit is not None:
            return max(limit - mx.get_active_memory(), 0)
    return host_free_bytes()


def working_set_bytes() -> int | None:
    """Return the memory that a GPU uses without slowing down, or None if unknown."""
    known = mx.device_info()
    found = known.get("max_recommended_working_set_size") or known.get("total_memory")
    return int(found) if found else None


def gpus(device: Device) -> tuple[Gpu, ...]:
    known = mx.device_info()
    size = known.get("memory_size") or known.get("total_memory") or 0
    found = Gpu(str(known.get("device_name", "a GPU")), int(size))
    return (found,) if device == "gpu" else ()


def wire(device: Device) -> None:
    """Keep weights and state resident, as mlx_lm does. Only Metal has such a limit."""
    limit = mx.device_info().get("max_recommended_working_set_size")
    if device == "gpu" and limit:
        mx.set_wired_limit(int(limit))


def plan_memory(
    options: EngineOptions, loaded: LoadedModel, layouts: Layouts, device: Device
) -> tuple[Capabilities, dict[KvType, int]]:
    """Describe the engine, and return the cells of each KV type. The budget is spent on the default
    type. Pools of other types hold at least one context."""
    free = min(free_bytes(device), options.memory_bytes or sys.maxsize)
    budget = int(options.kv_fraction * free)
    # Freed buffers that MLX keeps for reuse would otherwise grow to the peak of memory use.
    mx.set_cache_limit(budget // 16)
    kv_type = layouts.named(options.kv_type)
    layout = layouts.kv[kv_type]
    sequences = _sequences(options.parallel, layout.checkpoint_bytes, budget)
    fixed_bytes = layout.checkpoint_bytes * (sequences + 1)
    affordable = max(budget - fixed_bytes, 0) // max(layout.token_bytes, 1)
    context = options.context_tokens or min(loaded.context_tokens, max(affordable, 512))
    # Running sequences and the same number of idle ones cannot fill more.
    cells = max(context, min(affordable, 2 * options.parallel * context))
    other_cells = max(context, min(cells, affordable // 4))
    exact = (free - budget) // context_bytes(layout, context)
    block_tokens, step_tokens, chunk_tokens = (256, 512, 2048) if device == "gpu" else (64, 64, 512)
    capabilities = Capabilities(
        block_tokens=block_tokens,
        step_tokens=step_tokens,
        context_tokens=context,
        batch_tokens=chunk_tokens + options.parallel,
        pool_tokens=cells,
        sequences=sequences,
        exact_sequences=min(max(exact, 1), options.parallel),
        can_truncate=layouts.can_truncate,
        can_be_exact=not is_cuda(device),
        device=device,
        kv_type=kv_type,
        kv=layouts.kv,
        modalities=loaded.modalities,
        whole_pictures=loaded.whole_pictures,
        shares_cells=False,
        idle_is_free=True,
        async_launch=True,
        architecture=loaded.architecture,
        parameters=loaded.parameters,
        quantization=loaded.quantization,
        gpus=gpus(device),
    )
    return capabilities, dict.fromkeys(layouts.kv, other_cells) | {kv_type: cells}


def _sequences(parallel: int, checkpoint_bytes: int, budget_bytes: int) -> int:
    """Return the running sequences, and idle ones with checkpoints in half of the budget."""
    if not checkpoint_bytes:
        return parallel + IDLE_SEQUENCES
    return parallel + min(IDLE_SEQUENCES, budget_bytes // 2 // checkpoint_bytes)
