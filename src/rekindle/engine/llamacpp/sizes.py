"""Chooses the sizes of contexts and pools from the options, the model and the free memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rekindle.engine.base import EngineOptions, KvType
from rekindle.engine.llamacpp import bindings
from rekindle.engine.llamacpp.batch import BatchRows
from rekindle.engine.llamacpp.context import Context, Shape
from rekindle.engine.llamacpp.gpus import find_gpus
from rekindle.engine.llamacpp.model import LlamaModel
from rekindle.engine.llamacpp.pools import ExactBudget, OtherPools
from rekindle.engine.llamacpp.state import BlockLayout, read_layout
from rekindle.engine.llamacpp.vision import Projector
from rekindle.memory import host_free_bytes

GPU_BLOCK_TOKENS = 1024  # large, because each copy to or from a GPU has a fixed cost
PARK_FRACTION = 0.3  # default fraction of a GPU's free memory for parked sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    block_tokens: int
    step_tokens: int
    context_tokens: int
    park_tokens: int  # of idle sequences that are parked outside the pool
    layouts: Mapping[KvType, BlockLayout]  # of every KV type that sequences may have
    pool: Shape  # of the default KV type
    other_pools: OtherPools
    exact: ExactBudget


def choose_sizes(
    model: LlamaModel, options: EngineOptions, projector: Projector | None = None
) -> Sizes:
    park_fraction = _park_fraction(model, options)
    sequences = _sequences(model, options.parallel, parks=park_fraction > 0)
    state = measure_layout(model, options, options.kv_type)
    others = model.kv_types if state.sections else ()  # others cannot be converted
    layouts = {options.kv_type: state} | {
        kv_type: state.sized_as(kv_type) for kv_type in others if kv_type != options.kv_type
    }
    left_bytes = free_bytes(model)
    if options.memory_bytes is not None:
        left_bytes = min(left_bytes, options.memory_bytes)
    budget_bytes = int(options.kv_fraction * left_bytes)
    park_tokens = int(park_fraction * left_bytes) // max(state.each, 1)
    slots_bytes = state.checkpoint * (sequences + 1)  # independent of the number of cells
    affordable = max(budget_bytes - slots_bytes, 0) // max(state.each, 1)
    context_tokens, cells = _cells(model, options, affordable)
    step_tokens = GPU_BLOCK_TOKENS if model.on_gpu else 64
    whole = projector.max_vectors if projector and projector.is_whole else 0
    batch = max(2048 if model.on_gpu else 512, whole) + options.parallel
    has_places = projector is not None and projector.has_places
    shape = replace(_smallest_shape(model, options), has_places=has_places)
    spare = 1 if park_tokens else 0  # parking frees memory through a spare cell
    pool = replace(shape, cells=cells, sequences=sequences, batch=batch, spare_cells=spare)
    # Attention is split among threads, so an exact step always uses the same number of them.
    exact_batch = max(step_tokens, whole)
    exact = replace(shape, cells=context_tokens, batch=exact_batch, may_use_fewer=False)
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
    """Return the fraction of free memory for parked sequences.

    On a CPU idle state is kept in RAM instead. With a sliding window a parked sequence could be
    continued at its end only. Recurrent state cannot be shared.
    """
    if not model.can_truncate or model.window_tokens:
        return 0.0
    if options.park_fraction is None:
        return PARK_FRACTION if model.on_gpu else 0.0
    return options.park_fraction


def _sequences(model: LlamaModel, parallel: int, *, parks: bool) -> int:
    """Return the number of slots. With recurrent state, an unused one costs memory too."""
    idle = (64 if parks else 32) if model.can_truncate else 0
    return min(parallel + idle, bindings.MAX_SEQUENCES - 1)


def _block_tokens(model: LlamaModel) -> int:
    """Return a power of two that does not exceed a sliding window. llama.cpp exports no cells
    outside the window of the last token."""
    default = GPU_BLOCK_TOKENS if model.on_gpu else 64
    window = model.window_tokens
    return min(default, 1 << (window.bit_length() - 1)) if window else default


def _cells(model: LlamaModel, options: EngineOptions, affordable: int) -> tuple[int, int]:
    """Return the context length and the pool size in tokens."""
    most = min(model.trained_tokens, max(affordable, 512))
    context = options.context_tokens or most
    # Idle cells cost nothing on a GPU, but slow down every step on a CPU.
    useful = context * (options.parallel if model.on_gpu else 2)
    return context, max(context, min(affordable, useful))


def _other_pools(
    default: Shape, layouts: Mapping[KvType, BlockLayout], left_bytes: int, context: int
) -> OtherPools:
    """Size the other pools by what the default pool leaves of the KV budget. Each has at most the
    cells of the default pool, and at least one context."""
    shapes = {}
    for kv_type, state in layouts.items():
        if kv_type != default.kv_type:
            affordable = max(left_bytes, 0) // max(state.each, 1)
            cells = max(context, min(default.cells, affordable))
            shapes[kv_type] = _sized(replace(default, cells=cells, kv_type=kv_type), state)
    one = max((shape.size_bytes for shape in shapes.values()), default=0)
    return OtherPools(shapes=shapes, budget_bytes=max(left_bytes, one))


def _exact_budget(
    shape: Shape, layouts: Mapping[KvType, BlockLayout], left_bytes: int, *, most: int
) -> ExactBudget:
    """Spend what the pool leaves of the KV budget, and allow at least one context."""
    shapes = {name: _sized(replace(shape, kv_type=name), layouts[name]) for name in layouts}
    contexts = min(max(left_bytes // shapes[shape.kv_type].size_bytes, 1), most)
    return ExactBudget(shapes=shapes, contexts=contexts)


def _sized(shape: Shape, state: BlockLayout) -> Shape:
    size_bytes = shape.cells * state.each + (shape.sequences + 1) * state.checkpoint
    return replace(shape, size_bytes=max(size_bytes, 1))


def measure_layout(model: LlamaModel, options: EngineOptions, kv_type: KvType) -> BlockLayout:
    """Measure blocks of one and two tokens of a KV type in a temporary context."""
    shape = replace(_smallest_shape(model, options), kv_type=kv_type)
    context = Context(model.library, model.native, shape)
    try:
        context.decode([BatchRows(0, 0, [0, 0], False)])
        one, two = (context.export(0, 0, tokens) for tokens in (1, 2))
        checkpoint = len(context.checkpoint(0)) if context.shape.recurrent else 0
        return read_layout(one, two, checkpoint)
    finally:
        context.close()


def _smallest_shape(model: LlamaModel, options: EngineOptions) -> Shape:
    return Shape(
        cells=256,
        sequences=1,
        batch=8,
        threads=options.threads,
        may_use_fewer=not model.on_gpu,
        kv_type=options.kv_type,
        original_tokens=model.rope.original_tokens if model.rope else 0,
        recurrent=not model.can_truncate,
        adapter=model.adapter,
    )


def free_bytes(model: LlamaModel, *, spread_evenly: bool = False) -> int:
    """Return the free memory of the devices that hold the KV cells, after the weights are loaded.
    The fullest GPU limits cells that are spread evenly over all GPUs."""
    if not model.on_gpu:
        return host_free_bytes()
    free = [gpu.free_bytes for gpu in find_gpus(model.library, model.distribution.chosen)]
    return min(free, default=0) * len(free) if spread_evenly else sum(free)
