"""Chooses the device, and how much of its memory KV state may take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

from rekindle.engine.base import Device as Gpu
from rekindle.engine.base import EngineOptions, KvLayout, KvType
from rekindle.engine.mlx.sequences import PoolSize
from rekindle.memory import host_free_bytes

IDLE_SEQUENCES = 32  # idle conversations that may stay on the device

Device = Literal["cpu", "gpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MlxSizes:
    block_tokens: int
    step_tokens: int
    batch_tokens: int
    context_tokens: int
    sequences: int
    exact_sequences: int
    pools: Mapping[KvType, PoolSize]
    budget_bytes: int


def choose_device(gpu_layers: int | None) -> Device:
    """Return the default device of MLX, or the CPU if no layer may be on a GPU."""
    if gpu_layers == 0:
        mx.set_default_device(mx.Device(mx.cpu))
    return "gpu" if mx.default_device().type == mx.gpu else "cpu"


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
    """Keep weights and state resident up to the recommended size, as mlx_lm does. Only Metal has
    such a limit."""
    limit = mx.device_info().get("max_recommended_working_set_size")
    if device == "gpu" and limit:
        mx.set_wired_limit(int(limit))


def choose_sizes(
    options: EngineOptions,
    layouts: Mapping[KvType, KvLayout],
    default: KvType,
    *,
    trained_tokens: int,
    device: Device,
) -> MlxSizes:
    """Spend the budget on cells of the default type. Pools of other types hold at least one
    context."""
    free = free_bytes(device)
    budget = int(options.kv_fraction * free)
    layout = layouts[default]
    sequences = _sequences(options.parallel, layout.checkpoint_bytes, budget)
    fixed_bytes = layout.checkpoint_bytes * (sequences + 1)
    affordable = max(budget - fixed_bytes, 0) // max(layout.token_bytes, 1)
    context = options.context_tokens or min(trained_tokens, max(affordable, 512))
    # Running sequences and the same number of idle ones cannot fill more.
    cells = max(context, min(affordable, 2 * options.parallel * context))

    def pool(name: KvType) -> PoolSize:
        token_bytes = max(layouts[name].token_bytes, 1)
        own = cells if name == default else max(context, min(cells, affordable // 4))
        return PoolSize(
            cells=own, context_bytes=context * token_bytes + layouts[name].checkpoint_bytes
        )

    pools = {name: pool(name) for name in layouts}
    exact = min(max((free - budget) // pools[default].context_bytes, 1), options.parallel)
    block_tokens, step_tokens, chunk_tokens = (256, 512, 2048) if device == "gpu" else (64, 64, 512)
    return MlxSizes(
        block_tokens=block_tokens,
        step_tokens=step_tokens,
        batch_tokens=chunk_tokens + options.parallel,
        context_tokens=context,
        sequences=sequences,
        exact_sequences=exact,
        pools=pools,
        budget_bytes=budget,
    )


def _sequences(parallel: int, checkpoint_bytes: int, budget_bytes: int) -> int:
    """Return the running sequences, and the idle ones whose checkpoints fit in half of the
    budget."""
    if not checkpoint_bytes:
        return parallel + IDLE_SEQUENCES
    return parallel + min(IDLE_SEQUENCES, budget_bytes // 2 // checkpoint_bytes)


def limit_spare_buffers(sizes: MlxSizes) -> None:
    """Limit the freed buffers that MLX keeps for reuse. Otherwise they grow to the peak of memory
    use."""
    mx.set_cache_limit(sizes.budget_bytes // 16)
