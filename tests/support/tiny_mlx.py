"""Writes tiny random models in MLX's format, with the vocabulary and template of the tiny GGUF
models."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

import rekindle.engine.mlx  # noqa: F401  # before mlx_lm, whose import it makes harmless

from mlx_lm.tuner.utils import linear_to_lora_layers  # isort: skip
from mlx_lm.utils import load_model  # isort: skip
from tests.support.tiny import CONTROL, MERGED, TEMPLATE, VOCABULARY, spelling

WIDTH, HIDDEN, HEADS, KV_HEADS = 64, 128, 4, 2
CONTEXT = 4096
WINDOW = 64
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 0,
    "tie_word_embeddings": True,
}
_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
#: The part of config.json that differs, by family.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,  # full attention, can be truncated anywhere
    "llama-wide": _LLAMA | {"head_dim": 64},  # every group size divides the heads
    "gemma3": {  # sliding windows and full attention
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
    },
    "gemma3-wide": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "head_dim": 64,
        "query_pre_attn_scalar": 64,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
    },
    "mamba": {  # recurrent, cannot be truncated
        "model_type": "mamba",
        "num_hidden_layers": 3,
        "state_size": 16,
        "conv_kernel": 4,
        "time_step_rank": 8,
        "use_bias": False,
        "use_conv_bias": True,
    },
    "lfm2": {  # hybrid: short convolutions, attention in every other layer
        "model_type": "lfm2",
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention"] * 2,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": WIDTH,
        "block_ff_dim": HIDDEN,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
    },
    "falcon_h1": {  # hybrid, with attention and a state space in every layer
        "model_type": "falcon_h1",
        "num_hidden_layers": 2,
        "head_dim": 16,
        "mamba_d_ssm": 64,
        "mamba_d_head": 16,
        "mamba_n_heads": 4,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "lm_head_multiplier": 4.0,
    },
}


def write_tiny_mlx(path: Path, family: str = "llama", *, seed: int = 0, **config: Any) -> Path:
    """Write a folder with a model of the family. `config` overrides values of its config.json."""
    path.mkdir(parents=True, exist_ok=True)
    written = _COMMON | FAMILIES[family] | config
    (path / "config.json").write_text(json.dumps(written, indent=2))
    mx.save_safetensors(
        str(path / "model.safetensors"), _random_weights(written, seed), {"format": "mlx"}
    )
    write_tokenizer(path)
    return path


def write_tiny_adapter(path: Path, model: Path, *, seed: int = 0) -> Path:
    """Write a LoRA adapter like `mlx_lm.lora`, with weights that change the answers."""
    about = {"rank": 4, "scale": 10.0, "dropout": 0.0}
    settings = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": about}
    trained, _ = load_model(model)
    linear_to_lora_layers(trained, settings["num_layers"], about)
    named: dict[str, mx.array] = dict(tree_flatten(trained.parameters()))
    random = np.random.default_rng(seed)
    weights = {
        name: mx.array(random.standard_normal(named[name].shape).astype(np.float32))
        for name in sorted(named)
        if ".lora_" in name
    }
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps(settings))
    mx.save_safetensors(str(path / "adapters.safetensors"), weights)
    return path


def write_tokenizer(path: Path) -> None:
    """Write bytes, three control tokens and one merge, like `TinyModel` does for GGUF."""
    spelled = [spelling(byte).decode() for byte in range(256)]
    vocabulary = [*CONTROL, *spelled, MERGED.decode()]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [added_token(place, name) for place, name in enumerate(CONTROL)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {name: place for place, name in enumerate(vocabulary)},
            "merges": [["t", "h"]],
        },
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    about = {"bos_token": CONTROL[1], "eos_token": CONTROL[0], "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(about | {"add_bos_token": False}))


def added_token(token: int, content: str, *, special: bool = True) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token, "content": content, "special": special} | flags


def _random_weights(config: dict[str, Any], seed: int) -> dict[str, mx.array]:
    """Draw matrices from the seed, large enough that answers vary.

    Vectors and the matrix of the state space keep their initial values.
    """
    random = np.random.default_rng(seed)
    module = import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    named: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    return {name: _drawn(name, named[name], random) for name in sorted(named)}


def _drawn(name: str, value: mx.array, random: np.random.Generator) -> mx.array:
    if value.ndim < 2 or name.endswith("A_log"):
        return mx.ones(value.shape) if name.endswith(".bias") else value
    columns = int(np.prod(value.shape[1:]))
    scale = 0.25 if "embed" in name else columns**-0.5  # with more, answers repeat the last token
    drawn = (random.standard_normal(value.shape) * scale).astype(np.float32)
    if name == "lm_head.weight":
        drawn[: len(CONTROL)] = drawn[len(CONTROL) + 128 :] = 0  # it writes only ASCII
    return mx.array(drawn)
