"""The weights of a BERT in a GGUF file, for where NumPy computes it."""

from __future__ import annotations

import platform
from pathlib import Path

import numpy as np

from rekindle.engine.base import Matrix
from rekindle.engine.llamacpp import bindings
from rekindle.engine.llamacpp.bert import Bert
from rekindle.engine.llamacpp.gguf_header import GgufHeader, TensorPlace, open_header
from rekindle.engine.llamacpp.model import LlamaModel

FLOATS = {bindings.GGML_TYPES["f32"]: np.float32, bindings.GGML_TYPES["f16"]: np.float16}
FAST_MACHINES = ("x86_64", "AMD64")  # elsewhere the library's own kernels are as good
BODY = ("token_embd.weight", "position_embd.weight", "token_types.weight", "token_embd_norm.weight")
LAYER = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down")
NORMS = ("attn_output_norm", "layer_output_norm")


def _mean(rows: Matrix) -> Matrix:
    means: Matrix = rows.mean(axis=1)
    return means


def _first(rows: Matrix) -> Matrix:
    firsts: Matrix = rows[:, 0]
    return firsts


POOLS = {bindings.POOLING_MEAN: _mean, bindings.POOLING_CLS: _first}


def open_bert(model: LlamaModel, path: Path, threads: int) -> Bert | None:
    """The model for NumPy; None where llama.cpp is to compute it, because it is another kind of
    model, quantised, split, or not on an x86 CPU."""
    pool = POOLS.get(model.pooling)
    if pool is None or model.on_gpu or platform.machine() not in FAST_MACHINES:
        return None
    with open_header(model.library, path) as header:
        is_bert = header.text("general.architecture") == "bert"
        places = _places(header, model.layers) if is_bert else None
        if places is None:
            return None
        width = header.number("bert.embedding_length")
        return Bert(
            {name: _read(path, place, name, width) for name, place in places.items()},
            layers=model.layers,
            heads=header.number("bert.attention.head_count"),
            epsilon=header.real("bert.attention.layer_norm_epsilon"),
            pool=pool,
            threads=threads,
        )


def _places(header: GgufHeader, layers: int) -> dict[str, TensorPlace] | None:
    """Every tensor that such a model has; None unless all are there, as floats."""
    names = [*BODY, "token_embd_norm.bias"]
    for layer in range(layers):
        blocks = (f"blk.{layer}.{name}" for name in (*LAYER, *NORMS))
        names += [f"{block}.{part}" for block in blocks for part in ("weight", "bias")]
    found = {name: header.place(name) for name in names}
    places = {name: each for name, each in found.items() if each and each.kind in FLOATS}
    return places if len(places) == len(names) else None


def _read(path: Path, place: TensorPlace, name: str, width: int) -> Matrix:
    """A matrix has a row for each output."""
    kind = np.dtype(FLOATS[place.kind])
    count = place.size_bytes // kind.itemsize
    values = np.fromfile(path, kind, count, offset=place.offset_bytes).astype(np.float32)
    if name.endswith("_norm.weight") or name.endswith(".bias"):
        return values
    if name.endswith("ffn_down.weight"):
        return values.reshape(width, -1)
    return values.reshape(-1, width)
