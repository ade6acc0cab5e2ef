"""Memory of the device that MLX computes on, and what of it KV state may take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

from rekindle.engine.base import Device as Gpu
from rekindle.engine.base import EngineOptions, KvLayout, KvType
from rekindle.engine.mlx.sequences import PoolSize
from rekindle.memory import host_free_bytes

LEAST_CONTEXT_TOKENS = 512
IDLE_SEQUENCES = 32  # idle conversations that may stay on the device beside the active ones
SPARE_BUFFERS_SHARE = 16  # one in so many bytes of the KV budget is for buffers to be used again

Device = Literal["cpu", "gpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    block_tokens: int
    step_tokens: int
    batch_tokens: int
    context_tokens: int
    sequences: int
    exact_sequences: int
    pools: Mapping[KvType, PoolSize]
    budget_bytes: int


def choose_device(gpu_layers: int | None) -> Device:
    """The one that MLX would take; the CPU if no layer is to be on a GPU."""
    if gpu_layers == 0:
        mx.set_default_device(mx.Device(mx.cpu))
    return "gpu" if mx.default_device().type == mx.gpu else "cpu"


def free_bytes(device: Device) -> int:
    """Memory that is left where KV state goes."""
    if device == "gpu":
        limit = working_set_bytes()
        if limit is not None:
            return max(limit - mx.get_active_memory(), 0)
    return host_free_bytes()


def working_set_bytes() -> int | None:
    """What a GPU takes without slowing down; None where the device does not say."""
    known = mx.device_info()
    found = known.get("max_recommended_working_set_size") or known.get("total_memory")
    return int(found) if found else None


def gpus(device: Device) -> tuple[Gpu, ...]:
    """The one that MLX computes on, as far as it says what it is."""
    known = mx.device_info()
    size = known.get("memory_size") or known.get("total_memory") or 0
    found = Gpu(str(known.get("device_name", "a GPU")), int(size))
    return (found,) if device == "gpu" else ()


def wire(device: Device) -> None:
    """Keep weights and state resident up to the recommended size, as mlx_lm does; only Metal has
    such a limit."""
    limit = mx.device_info().get("max_recommended_working_set_size")
    if device == "gpu" and limit:
        mx.set_wired_limit(int(limit))


def choose_sizes(
    options: EngineOptions,
    layouts: Mapping[KvType, KvLayout],
    usual: KvType,
    *,
    trained_tokens: int,
    device: Device,
) -> Sizes:
    """Cells of the usual type within the budget; of another, as many as a context at least."""
    free = free_bytes(device)
    budget = int(options.kv_fraction * free)
    layout = layouts[usual]
    sequences = _sequences(options.parallel, layout.checkpoint_bytes, budget)
    fixed_bytes = layout.checkpoint_bytes * (sequences + 1)
    affordable = max(budget - fixed_bytes, 0) // max(layout.token_bytes, 1)
    context = options.context_tokens or min(trained_tokens, max(affordable, LEAST_CONTEXT_TOKENS))
    # More than those that run, and as many idle ones, cannot fill.
    cells = max(context, min(affordable, 2 * options.parallel * context))

    def pool(name: KvType) -> PoolSize:
        token_bytes = max(layouts[name].token_bytes, 1)
        own = cells if name == usual else max(context, min(cells, affordable // 4))
        return PoolSize(
            cells=own, context_bytes=context * token_bytes + layouts[name].checkpoint_bytes
        )

    pools = {name: pool(name) for name in layouts}
    exact = min(max((free - budget) // pools[usual].context_bytes, 1), options.parallel)
    block_tokens, step_tokens, slice_tokens = (256, 512, 2048) if device == "gpu" else (64, 64, 512)
    return Sizes(
        block_tokens=block_tokens,
        step_tokens=step_tokens,
        batch_tokens=slice_tokens + options.parallel,
        context_tokens=context,
        sequences=sequences,
        exact_sequences=exact,
        pools=pools,
        budget_bytes=budget,
    )


def _sequences(parallel: int, checkpoint_bytes: int, budget_bytes: int) -> int:
    """Those that run, and as many idle ones as half of the budget holds the fixed parts of."""
    if not checkpoint_bytes:
        return parallel + IDLE_SEQUENCES
    return parallel + min(IDLE_SEQUENCES, budget_bytes // 2 // checkpoint_bytes)


def limit_spare_buffers(sizes: Sizes) -> None:
    """MLX keeps buffers that were freed, to use them again; no more than a share of the budget, or
    they would become as large as whatever was once held."""
    mx.set_cache_limit(sizes.budget_bytes // SPARE_BUFFERS_SHARE)
