"""Writes tiny random models with M-RoPE, where a position is three numbers, like Qwen-VL."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.support.tiny import HEAD_WIDTH, HEADS, KV_HEADS, WIDTH, TinyModel

DEEP_LAYERS = 1  # layers of Qwen3-VL that get their own part of a vector


def write_qwen2vl(path: Path, *, layers: int = 2, head_width: int = HEAD_WIDTH) -> Path:
    """A model with full attention."""
    model = _model(path, "qwen2vl", layers, head_width)
    for layer in range(layers):
        block = f"blk.{layer}."
        model.ones(block + "attn_norm.weight", WIDTH)
        model.ones(block + "ffn_norm.weight", WIDTH)
        model.attention_and_hidden(block)
        for name, width in (("q", WIDTH), ("k", WIDTH // 2), ("v", WIDTH // 2)):
            model.ones(f"{block}attn_{name}.bias", width)
    model.finish()
    return path


def write_qwen3vl(path: Path, *, layers: int = 2, head_width: int = HEAD_WIDTH) -> Path:
    """The vectors of a picture contain a part for each of several layers."""
    model = _model(path, "qwen3vl", layers, head_width)
    model.number("n_deepstack_layers", DEEP_LAYERS)
    for layer in range(layers):
        block = f"blk.{layer}."
        model.ones(block + "attn_norm.weight", WIDTH)
        model.ones(block + "ffn_norm.weight", WIDTH)
        _norms(model, block, head_width)
        model.attention_and_hidden(block)
    model.finish()
    return path


def write_qwen35(path: Path, *, layers: int = 4, head_width: int = HEAD_WIDTH) -> Path:
    """A hybrid model: a gated delta net, whose state cannot be truncated, and attention in every
    other layer."""
    state, key_heads, value_heads, kernel = 16, 2, 4, 4
    inner = state * value_heads
    model = _model(path, "qwen35", layers, head_width)
    model.number("full_attention_interval", 2)
    for key, value in {
        "conv_kernel": kernel,
        "inner_size": inner,
        "state_size": state,
        "time_step_rank": value_heads,
        "group_count": key_heads,
    }.items():
        model.number(f"ssm.{key}", value)
    for layer in range(layers):
        block = f"blk.{layer}."
        model.ones(block + "attn_norm.weight", WIDTH)
        model.ones(block + "post_attention_norm.weight", WIDTH)
        if layer % 2:
            _norms(model, block, head_width)
            model.matrix(block + "attn_q.weight", WIDTH, 2 * WIDTH)
            model.matrix(block + "attn_k.weight", WIDTH, WIDTH // 2)
            model.matrix(block + "attn_v.weight", WIDTH, WIDTH // 2)
            model.matrix(block + "attn_output.weight", WIDTH, WIDTH)
        else:
            mixed = 2 * state * key_heads + inner
            model.matrix(block + "attn_qkv.weight", WIDTH, mixed)
            model.matrix(block + "attn_gate.weight", WIDTH, inner)
            model.matrix(block + "ssm_conv1d.weight", kernel, mixed)
            model.ones(block + "ssm_dt.bias", value_heads)
            decay = -np.linspace(0.1, 1, value_heads, dtype=np.float32)
            model.writer.add_tensor(block + "ssm_a", decay)
            model.matrix(block + "ssm_beta.weight", WIDTH, value_heads)
            model.matrix(block + "ssm_alpha.weight", WIDTH, value_heads)
            model.ones(block + "ssm_norm.weight", state)
            model.matrix(block + "ssm_out.weight", inner, WIDTH)
        model.hidden(block)
    model.finish()
    return path


def _model(path: Path, architecture: str, layers: int, head_width: int) -> TinyModel:
    model = TinyModel(path, architecture, layers, seed=0, context=4096)
    model.number("attention.head_count", HEADS * HEAD_WIDTH // head_width)
    model.number("attention.head_count_kv", KV_HEADS * HEAD_WIDTH // head_width)
    sections = [head_width // 4, head_width // 8, head_width // 8, 0]
    model.writer.add_array(f"{architecture}.rope.dimension_sections", sections)
    model.ones("output_norm.weight", WIDTH)
    return model


def _norms(model: TinyModel, block: str, head_width: int) -> None:
    model.ones(block + "attn_q_norm.weight", head_width)
    model.ones(block + "attn_k_norm.weight", head_width)
