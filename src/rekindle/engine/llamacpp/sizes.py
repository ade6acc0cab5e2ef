"""How many tokens the contexts of a model hold: what was asked for, or else what memory allows."""

from __future__ import annotations

from dataclasses import dataclass

from rekindle.engine.base import EngineOptions
from rekindle.engine.llamacpp import bindings
from rekindle.engine.llamacpp.context import Context, Shape
from rekindle.engine.llamacpp.model import LlamaModel
from rekindle.engine.llamacpp.state import StateBytes, measure_state

LEAST_CONTEXT_TOKENS = 512
RESIDENT_SEQUENCES = 32  # idle conversations that may stay in the pool beside the active ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    block_tokens: int
    step_tokens: int
    context_tokens: int
    pool: Shape  # of the context that shared sequences have together
    exact: Shape  # of the context that one exact sequence has to itself


def choose_sizes(model: LlamaModel, options: EngineOptions) -> Sizes:
    sequences = _sequences(model, options.parallel)
    context_tokens, cells = _cells(model, options, sequences)
    step_tokens = 512 if model.on_gpu else 64
    batch = (2048 if model.on_gpu else 512) + options.parallel
    return Sizes(
        block_tokens=_block_tokens(model),
        step_tokens=step_tokens,
        context_tokens=context_tokens,
        pool=_shape(model, options, cells=cells, sequences=sequences, batch=batch),
        exact=_shape(model, options, cells=context_tokens, sequences=1, batch=step_tokens),
    )


def _sequences(model: LlamaModel, parallel: int) -> int:
    """Those that run, and idle ones; recurrent state costs each slot, used or not."""
    residents = RESIDENT_SEQUENCES if model.can_truncate else 0
    return min(parallel + residents, bindings.MAX_SEQUENCES - 1)


def _block_tokens(model: LlamaModel) -> int:
    """A power of two, and no more than a sliding window: llama.cpp leaves out of a state what
    lies behind the window of its last token."""
    usual = 256 if model.on_gpu else 64
    window = model.window_tokens
    return min(usual, 1 << (window.bit_length() - 1)) if window else usual


def _cells(model: LlamaModel, options: EngineOptions, sequences: int) -> tuple[int, int]:
    """Context and pool, in tokens."""
    state = _sample_state(model, options)
    slots_bytes = state.checkpoint * (sequences + 1)  # taken however many cells there are
    budget = int(options.kv_fraction * model.free_bytes()) - slots_bytes
    affordable = max(budget, 0) // max(state.each, 1)
    most = min(model.trained_tokens, max(affordable, LEAST_CONTEXT_TOKENS))
    context = options.context_tokens or most
    # Idle cells are free on a GPU, but slow every step down on a CPU.
    useful = context * (options.parallel if model.on_gpu else 2)
    return context, max(context, min(affordable, useful))


def _sample_state(model: LlamaModel, options: EngineOptions) -> StateBytes:
    """What state takes, measured on a throw-away context."""
    shape = _shape(model, options, cells=256, sequences=1, batch=8)
    context = Context(model.library, model.native, shape)
    try:
        return measure_state(context)
    finally:
        context.close()


def _shape(
    model: LlamaModel, options: EngineOptions, *, cells: int, sequences: int, batch: int
) -> Shape:
    return Shape(
        cells=cells,
        sequences=sequences,
        threads=options.threads,
        batch=batch,
        kv_type=options.kv_type,
        recurrent=not model.can_truncate,
    )
