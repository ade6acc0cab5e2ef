"""Sizes of contexts in tokens, as asked for or as memory allows, and of their state in bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rekindle.engine.base import EngineOptions, KvType
from rekindle.engine.llamacpp import bindings
from rekindle.engine.llamacpp.batch import Rows
from rekindle.engine.llamacpp.context import Context, ContextSize, Shape
from rekindle.engine.llamacpp.model import LlamaModel
from rekindle.engine.llamacpp.pools import ExactBudget, OtherPools
from rekindle.engine.llamacpp.state import StateLayout, read_layout
from rekindle.engine.llamacpp.vision import Projector
from rekindle.memory import host_free_bytes

# ----------------------------------------------------------------------
# The GPUs that llama.cpp was built for and has found.


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


LEAST_CONTEXT_TOKENS = 512
IDLE_SEQUENCES = 32  # idle conversations that may stay in the pool beside the active ones
GPU_BLOCK_TOKENS = 1024  # a copy to or from the device takes its time to begin with
PARKED_SEQUENCES = 64  # or outside it, on the same device
PARK_FRACTION = 0.3  # of a GPU's free memory, unless told otherwise
SPARE_CELLS = 1  # with which parking gives memory back


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    block_tokens: int
    step_tokens: int
    context_tokens: int
    park_tokens: int  # of idle sequences outside the pool
    layouts: Mapping[KvType, StateLayout]  # of every KV type that sequences may have
    pool: Shape  # of the context that shared sequences of the usual type have together
    other_pools: OtherPools  # and those of another type
    exact: ExactBudget  # for the contexts that exact sequences have to themselves


def choose_sizes(
    model: LlamaModel, options: EngineOptions, projector: Projector | None = None
) -> Sizes:
    park_fraction = _park_fraction(model, options)
    sequences = _sequences(model, options.parallel, parks=park_fraction > 0)
    state = measure_layout(model, options, options.kv_type)
    others = model.kv_types if state.sections else ()  # else it is not known how to transcode
    layouts = {options.kv_type: state} | {
        kv_type: state.sized_as(kv_type) for kv_type in others if kv_type != options.kv_type
    }
    left_bytes = free_bytes(model)
    budget_bytes = int(options.kv_fraction * left_bytes)
    park_tokens = int(park_fraction * left_bytes) // max(state.each, 1)
    slots_bytes = state.checkpoint * (sequences + 1)  # taken however many cells there are
    affordable = max(budget_bytes - slots_bytes, 0) // max(state.each, 1)
    context_tokens, cells = _cells(model, options, affordable)
    step_tokens = GPU_BLOCK_TOKENS if model.on_gpu else 64
    whole = projector.most_vectors if projector and projector.is_whole else 0
    batch = max(2048 if model.on_gpu else 512, whole) + options.parallel
    exact_batch = max(step_tokens, whole)
    shape = partial(_shape, model, options, has_places=bool(projector and projector.has_places))
    pool = shape(
        cells=cells, sequences=sequences, batch=batch, spare=SPARE_CELLS * bool(park_tokens)
    )
    # A row's attention is divided among threads: their number is the same in every exact step.
    exact = shape(cells=context_tokens, sequences=1, batch=exact_batch, may_use_fewer=False)
    rest_bytes = budget_bytes - slots_bytes - cells * state.each
    return Sizes(
        block_tokens=_block_tokens(model),
        step_tokens=step_tokens,
        context_tokens=context_tokens,
        park_tokens=park_tokens,
        layouts=layouts,
        pool=pool,
        other_pools=_other_pools(pool, layouts, rest_bytes, context_tokens),
        exact=_exact_budget(exact, layouts, rest_bytes, most=options.parallel),
    )


def _park_fraction(model: LlamaModel, options: EngineOptions) -> float:
    """Of the free memory. On a CPU idle state is as well kept in RAM. A parked sequence of a model
    with a sliding window could be continued at its end alone, a recurrent one not be shared."""
    if not model.can_truncate or model.window_tokens:
        return 0.0
    if options.park_fraction is None:
        return PARK_FRACTION if model.on_gpu else 0.0
    return options.park_fraction


def _sequences(model: LlamaModel, parallel: int, *, parks: bool) -> int:
    """Those that run, and idle ones; recurrent state costs each slot, used or not."""
    idle = (PARKED_SEQUENCES if parks else IDLE_SEQUENCES) if model.can_truncate else 0
    return min(parallel + idle, bindings.MAX_SEQUENCES - 1)


def _block_tokens(model: LlamaModel) -> int:
    """A power of two, and no more than a sliding window: llama.cpp leaves out of a state what
    lies behind the window of its last token."""
    usual = GPU_BLOCK_TOKENS if model.on_gpu else 64
    window = model.window_tokens
    return min(usual, 1 << (window.bit_length() - 1)) if window else usual


def _cells(model: LlamaModel, options: EngineOptions, affordable: int) -> tuple[int, int]:
    """Context and pool, in tokens."""
    most = min(model.trained_tokens, max(affordable, LEAST_CONTEXT_TOKENS))
    context = options.context_tokens or most
    # Idle cells are free on a GPU, but slow every step down on a CPU.
    useful = context * (options.parallel if model.on_gpu else 2)
    return context, max(context, min(affordable, useful))


def _other_pools(
    usual: Shape, layouts: Mapping[KvType, StateLayout], left_bytes: int, context: int
) -> OtherPools:
    """What the usual pool leaves of the KV budget, but no more cells than that one has, and one
    context in any case."""
    sizes = {}
    for kv_type, state in layouts.items():
        if kv_type != usual.kv_type:
            affordable = max(left_bytes, 0) // max(state.each, 1)
            cells = max(context, min(usual.cells, affordable))
            shape = replace(usual, cells=cells, kv_type=kv_type)
            sizes[kv_type] = ContextSize(shape, _context_bytes(shape, state))
    one = max((size.size_bytes for size in sizes.values()), default=0)
    return OtherPools(sizes=sizes, budget_bytes=max(left_bytes, one))


def _exact_budget(
    shape: Shape, layouts: Mapping[KvType, StateLayout], left_bytes: int, *, most: int
) -> ExactBudget:
    """What the pool leaves of the KV budget, and one context in any case."""
    shapes = {kv_type: replace(shape, kv_type=kv_type) for kv_type in layouts}
    sizes = {
        kv_type: ContextSize(shapes[kv_type], _context_bytes(shapes[kv_type], state))
        for kv_type, state in layouts.items()
    }
    contexts = min(max(left_bytes // sizes[shape.kv_type].size_bytes, 1), most)
    return ExactBudget(sizes=sizes, contexts=contexts)


def _context_bytes(shape: Shape, state: StateLayout) -> int:
    return max(shape.cells * state.each + (shape.sequences + 1) * state.checkpoint, 1)


def measure_layout(model: LlamaModel, options: EngineOptions, kv_type: KvType) -> StateLayout:
    """What state of a KV type is like: blocks of one and of two tokens in a throw-away context."""
    shape = _shape(model, options, cells=256, sequences=1, batch=8)
    context = Context(model.library, model.native, replace(shape, kv_type=kv_type))
    try:
        context.decode([Rows(0, 0, [0, 0], False)])
        one, two = (context.export(0, 0, tokens) for tokens in (1, 2))
        checkpoint = len(context.checkpoint(0)) if context.shape.recurrent else 0
        return read_layout(one, two, checkpoint)
    finally:
        context.close()


def _shape(
    model: LlamaModel,
    options: EngineOptions,
    *,
    cells: int,
    sequences: int,
    batch: int,
    spare: int = 0,
    may_use_fewer: bool = True,
    has_places: bool = False,
) -> Shape:
    return Shape(
        cells=cells,
        sequences=sequences,
        threads=options.threads,
        may_use_fewer=may_use_fewer and not model.on_gpu,
        batch=batch,
        spare_cells=spare,
        kv_type=options.kv_type,
        original_tokens=model.rope.original_tokens if model.rope else 0,
        recurrent=not model.can_truncate,
        has_places=has_places,
    )


def evenly_free_bytes(model: LlamaModel) -> int:
    """Memory for cells that lie on all GPUs alike: what the fullest has left, of each."""
    if not model.on_gpu:
        return host_free_bytes()
    free = [gpu.free_bytes for gpu in find_gpus(model.library)]
    return min(free, default=0) * len(free)


def free_bytes(model: LlamaModel) -> int:
    """Memory that is left where the KV cells go: of all GPUs together, after the weights."""
    if not model.on_gpu:
        return host_free_bytes()
    return sum(gpu.free_bytes for gpu in find_gpus(model.library))
