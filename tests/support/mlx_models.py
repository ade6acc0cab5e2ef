"""Builds tiny random MLX models in memory, without folder, tokenizer or engine."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map_with_path

import rekindle.engine.mlx  # noqa: F401  # before mlx_lm, whose import it makes harmless

VOCABULARY = 260
WINDOW = 24
PROMPT = [3 + (7 * n) % 200 for n in range(80)]

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-narrow": {"model_type": "llama", "head_dim": 16},
    "gemma3": {  # sliding window in every other layer
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 64,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
        "num_hidden_layers": 4,
    },
    "mamba": {
        "model_type": "mamba",
        "state_size": 16,
        "conv_kernel": 4,
        "time_step_rank": 8,
        "use_bias": False,
        "use_conv_bias": True,
    },
    "lfm2": {  # attention and short convolutions
        "model_type": "lfm2",
        "hidden_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "layer_types": ["conv", "full_attention"],
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 128,
        "block_ff_dim": 128,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
    },
    "falcon_h1": {  # both in every layer, so caches are lists
        "model_type": "falcon_h1",
        "mamba_d_ssm": 64,
        "mamba_d_head": 16,
        "mamba_n_heads": 4,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "lm_head_multiplier": 4.0,
    },
    "llama4": {  # chunked attention in three of four layers
        "model_type": "llama4",
        "text_config": _COMMON
        | {
            "model_type": "llama4_text",
            "attention_bias": False,
            "attention_chunk_size": WINDOW,
            "interleave_moe_layer_step": 8,
            "intermediate_size_mlp": 128,
            "num_experts_per_tok": 1,
            "num_local_experts": 1,
            "num_hidden_layers": 4,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "use_qk_norm": False,
        },
    },
    "gpt_oss": {  # attention with sinks, which mlx_lm cannot compute from quantised keys
        "model_type": "gpt_oss",
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
TRUNCATING = ("llama", "llama-narrow")
WHOLE = ("gemma3", "mamba", "lfm2", "falcon_h1", "llama4", "gpt_oss")


@cache
def tiny_model(family: str, dtype: mx.Dtype = mx.float32) -> Any:
    config = _COMMON | CONFIGS[family]
    module = import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    key = mx.random.key(0)
    places = {name: place for place, (name, _) in enumerate(tree_flatten(model.parameters()))}

    def drawn(name: str, value: mx.array) -> mx.array:
        if value.ndim < 2 or name.endswith("A_log"):
            return value.astype(dtype)
        own = mx.random.split(key, len(places))[places[name]]
        scaled: mx.array = mx.random.normal(value.shape, key=own) * value.shape[-1] ** -0.5
        return scaled.astype(dtype)

    model.update(tree_map_with_path(drawn, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


def step(model: Any, caches: list[Any], tokens: list[int]) -> mx.array:
    """Append tokens, and return the logits after the last one."""
    logits: mx.array = model(mx.array([tokens]), cache=caches)[0, -1]
    mx.eval(logits, [each.state for each in caches])
    return logits


def greedy(logits: mx.array) -> int:
    token: Any = mx.argmax(logits).item()
    return int(token)


def answer(model: Any, caches: list[Any], tokens: list[int], count: int = 8) -> list[Any]:
    """The logits after `tokens`, and after each greedy token that follows."""
    rows = [step(model, caches, tokens)]
    for _ in range(count):
        rows.append(step(model, caches, [greedy(rows[-1])]))
    return [row.tolist() for row in rows]
