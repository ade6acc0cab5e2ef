"""Writes tiny random models as Hugging Face folders, and computes their logits with llama.cpp."""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

import rekindle.engine.mlx  # noqa: F401  # before mlx_lm, whose import it makes harmless
from rekindle.engine.base import EngineOptions
from rekindle.engine.llamacpp import bindings
from rekindle.engine.llamacpp.model import LlamaModel
from tests.support.tiny import CONTROL, VOCABULARY
from tests.support.tiny_mlx import write_tokenizer

CONTEXT = 4096
WINDOW = 32
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
_LONG, _SHORT = ([1.0 + step * n for n in range(6)] for step in (0.5, 0.05))
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 0,
}


def _family(model_type: str, model_class: str, **values: Any) -> dict[str, Any]:
    return _COMMON | {"model_type": model_type, "architectures": [model_class], **values}


_GEMMA3: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": WINDOW,
    "sliding_window_pattern": 2,
    "rope_local_base_freq": 1000.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
_QWEN3: dict[str, Any] = {"head_dim": 32, "attention_bias": False}
#: config.json by family.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _family("llama", "LlamaForCausalLM"),
    "llama-3": _family("llama", "LlamaForCausalLM", rope_scaling=_LLAMA3, head_dim=32),
    "llama-linear": _family(
        "llama", "LlamaForCausalLM", rope_scaling={"type": "linear", "factor": 2.0}
    ),
    "llama-biased": _family(
        "llama", "LlamaForCausalLM", attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "mistral": _family("mistral", "MistralForCausalLM", sliding_window=None),
    "qwen2": _family("qwen2", "Qwen2ForCausalLM", tie_word_embeddings=True),
    "qwen3": _family("qwen3", "Qwen3ForCausalLM", **_QWEN3),
    "qwen3-yarn": _family("qwen3", "Qwen3ForCausalLM", **_QWEN3, rope_scaling=_YARN),
    "qwen3-moe": _family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        **_QWEN3,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        norm_topk_prob=True,
    ),
    "gemma3": _family("gemma3_text", "Gemma3ForCausalLM", **_GEMMA3),
    "gemma3-linear": _family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        **_GEMMA3,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    ),
    "phi3": _family("phi3", "Phi3ForCausalLM", original_max_position_embeddings=CONTEXT),
    "phi3-long": _family(
        "phi3",
        "Phi3ForCausalLM",
        partial_rotary_factor=0.75,
        original_max_position_embeddings=64,
        rope_scaling={"type": "longrope", "long_factor": _LONG, "short_factor": _SHORT},
        auto_map={"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
    ),
    "smollm3": _family(
        "smollm3", "SmolLM3ForCausalLM", num_hidden_layers=5, no_rope_layers=[1, 1, 1, 0, 1]
    ),
}


def write_tiny_folder(
    path: Path, family: str = "llama", *, dtype: str = "float32", shards: int = 1, **config: Any
) -> Path:
    """Write a folder as a model's authors publish it. `config` overrides values of config.json."""
    path.mkdir(parents=True, exist_ok=True)
    written = CONFIGS[family] | config
    (path / "config.json").write_text(json.dumps(written, indent=2))
    write_weights(path, random_weights(written), dtype=dtype, shards=shards)
    write_tokenizer(path)
    return path


def write_weights(
    path: Path, weights: dict[str, mx.array], *, dtype: str = "float32", shards: int = 1
) -> None:
    typed = {name: value.astype(getattr(mx, dtype)) for name, value in weights.items()}
    if shards == 1:
        mx.save_safetensors(str(path / "model.safetensors"), typed, {"format": "pt"})
        return
    places: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: typed[name] for name in sorted(typed)[shard::shards]}
        mx.save_safetensors(str(path / file), part, {"format": "pt"})
        places |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def random_weights(config: dict[str, Any], seed: int = 0) -> dict[str, mx.array]:
    """Draw every tensor of the model, under the names of its authors."""
    random = np.random.default_rng(seed)
    module = import_module(f"mlx_lm.models.{config['model_type'].replace('mistral', 'llama')}")
    model = module.Model(module.ModelArgs.from_dict(config))
    named: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    found = {}
    for name in sorted(named):
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        value = _drawn(name, named[name].shape, random, is_gemma="gemma" in config["model_type"])
        for expert in range(len(value)) if "switch_mlp" in name else ():
            found[name.replace("switch_mlp", f"experts.{expert}")] = value[expert]
        if "switch_mlp" not in name:
            found[name] = value
    return found


def _drawn(
    name: str, shape: Sequence[int], random: np.random.Generator, *, is_gemma: bool
) -> mx.array:
    values = random.standard_normal(shape).astype(np.float32)
    if re.search(r"norm\.weight$", name):
        return mx.array(0.2 * values + (0 if is_gemma else 1))
    if len(shape) < 2:
        return mx.array(0.1 * values)
    scale = 0.25 if "embed" in name else shape[-1] ** -0.5
    values *= scale
    if name == "lm_head.weight":
        values[: len(CONTROL)] = values[len(CONTROL) + 128 :] = 0  # it writes only ASCII
    return mx.array(values)


def llama_logits(path: Path, tokens: Sequence[int], *, context: int = 512) -> np.ndarray[Any, Any]:
    """Return llama.cpp's logits after each token, with keys and values in F32."""
    options = EngineOptions(path=path, parallel=1, threads=1, context_tokens=context)
    model = LlamaModel(options, lambda _done: None)
    library, count = model.library, len(tokens)
    params = library.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = context
    params.n_threads = params.n_threads_batch = 1
    params.flash_attn_type = 0
    params.type_k = params.type_v = 0
    native = library.llama_init_from_model(model.native, params)
    owner = ctypes.cast((ctypes.c_int32 * 1)(0), ctypes.POINTER(ctypes.c_int32))
    owners = (ctypes.POINTER(ctypes.c_int32) * count)(*[owner] * count)
    batch = bindings.LlamaBatch(
        count,
        (ctypes.c_int32 * count)(*tokens),
        None,
        (ctypes.c_int32 * count)(*range(count)),
        (ctypes.c_int32 * count)(*[1] * count),
        owners,
        (ctypes.c_int8 * count)(*[1] * count),
    )
    assert library.llama_decode(native, batch) == 0
    rows = [
        np.ctypeslib.as_array(
            ctypes.cast(library.llama_get_logits_ith(native, at), ctypes.POINTER(ctypes.c_float)),
            (model.tokenizer.size,),
        ).copy()
        for at in range(count)
    ]
    library.llama_free(native)
    library.llama_model_free(model.native)
    return np.stack(rows)


def mlx_logits(path: Path, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
    """Return mlx-lm's logits after each token, computed in F32."""
    from mlx_lm.utils import load_model

    model, _ = load_model(path)
    model.set_dtype(mx.float32)
    return np.array(model(mx.array([list(tokens)]))[0].astype(mx.float32))
