"""A model that llama.cpp would compute differently is refused before a byte is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from rekindle.errors import ModelError
from rekindle.models.architectures import ARCHITECTURES
from rekindle.models.conversion import convert
from tests.support.tiny_safetensors import CONFIGS, write_tiny_folder

from .tiny import RecordedProgress

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"model_type": "mixtral"}, "of the type 'mixtral', which is not converted"),
    ("llama", {"model_type": None}, "of the type 'None'"),
    (
        "llama",
        {"model_type": "x", "auto_map": {"AutoModelForCausalLM": "modeling_x.XForCausalLM"}},
        "needs code of its own, which is never run",
    ),
    (
        "llama",
        {"auto_map": {"AutoModelForCausalLM": "modeling_x.XForCausalLM"}},
        "a XForCausalLM, .*Code of a model is never run",
    ),
    ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "SequenceClassification"),
    ("llama", {"quantization_config": {"quant_method": "gptq"}}, r"already quantised \(gptq\)"),
    ("llama", {"quantization_config": {"quant_method": "awq"}}, r"already quantised \(awq\)"),
    (
        "llama",
        {"quantization": {"bits": 4, "group_size": 64}},
        r"for MLX \(4 bits\).*rekindle\[mlx",
    ),
    ("llama", {"hidden_act": "relu"}, "activation relu"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "encoding 'dynamic'"),
    ("llama", {"rope_scaling": {"rope_type": "longrope"}}, "encoding 'longrope'"),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 0}}, "unusable|lacks"),
    ("llama", {"rope_scaling": [1]}, "rope_scaling"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("llama", {"num_hidden_layers": 0}, "unusable num_hidden_layers"),
    ("llama", {"num_hidden_layers": 10**6}, "unusable num_hidden_layers"),
    ("llama", {"hidden_size": "wide"}, "unusable hidden_size"),
    ("llama", {"vocab_size": None}, "lacks vocab_size"),
    ("llama", {"num_key_value_heads": 3}, "num_key_value_heads"),
    ("llama", {"num_hidden_layers": 3}, "lacks the tensors model.layers.2."),
    ("llama", {"num_hidden_layers": 1}, r"does not use \(model.layers.1."),
    ("qwen2", {"head_dim": 32}, "heads of 32 values"),
    ("qwen3-yarn", {"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 1.0}}, "mscale"),
    ("qwen3-moe", {"norm_topk_prob": False}, "norm_topk_prob"),
    ("qwen3-moe", {"decoder_sparse_step": 2}, "layers without experts"),
    ("qwen3-moe", {"mlp_only_layers": [0]}, "layers without experts"),
    ("qwen3-moe", {"num_experts": 5}, "lacks the tensors model.layers.0.mlp.experts.4."),
    ("qwen3-moe", {"num_experts_per_tok": 9}, "num_experts_per_tok"),
    ("gemma3", {"query_pre_attn_scalar": 64}, "query_pre_attn_scalar"),
    ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ("gemma3", {"layer_types": ["chunked_attention"] * 4}, "unusable layer_types"),
    ("phi3-long", {"rope_scaling": {"type": "longrope", "long_factor": [1.0]}}, "rope_scaling"),
    ("smollm3", {"no_rope_layers": [1, 0, 1, 0, 1]}, "every fourth"),
    ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 3}, "every fourth"),
]


@pytest.mark.parametrize(("family", "config", "message"), REFUSED)
def test_what_would_be_computed_differently_is_refused(
    family: str, config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = write_tiny_folder(tmp_path / "tiny", family)
    (folder / "config.json").write_text(json.dumps(CONFIGS[family] | config))
    with pytest.raises(ModelError, match=message) as refused:
        convert(folder, models_dir=tmp_path / "models", progress=RecordedProgress())
    assert not list(tmp_path.rglob("*.gguf"))
    remedies = ("GGUF file", "Fetch the model again", "original")
    assert any(remedy in str(refused.value) for remedy in remedies)


@pytest.mark.parametrize("name", ["hf_quant_config.json", "quantize_config.json"])
def test_a_file_of_quantisation_settings_is_noticed(name: str, tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny")
    (folder / name).write_text("{}")
    with pytest.raises(ModelError, match="already quantised"):
        convert(folder, models_dir=tmp_path / "models", progress=RecordedProgress())


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny", "gemma3")
    loaded: Any = mx.load(str(folder / "model.safetensors"))
    del loaded["model.layers.3.self_attn.q_norm.weight"]
    mx.save_safetensors(str(folder / "model.safetensors"), loaded)
    with pytest.raises(ModelError, match=r"lacks the tensors model.layers.3.self_attn.q_norm"):
        convert(folder, models_dir=tmp_path / "models", progress=RecordedProgress())


def test_every_architecture_has_a_tiny_model() -> None:
    """gemma3 with pictures is written by its own test."""
    assert {config["model_type"] for config in CONFIGS.values()} == ARCHITECTURES.keys() - {
        "gemma3"
    }
