"""Writes the Llama model of a GGUF file as a folder in MLX's format, with the same values.

MLX reads Q4_0, Q4_1 and Q8_0 tensors as quantised groups of 32 with a scale and a bias. The folder
therefore has the same numbers as the file, some of them in another order.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx

from tests.support.gguf_vocabulary import metadata_of, write_folder_vocabulary

GROUP_SIZE = 32
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TENSOR = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<name>\w+)\.(?P<part>weight|scales|biases)")


def write_gguf_as_folder(source: Path, folder: Path) -> Path:
    """Write config.json, weights and tokenizer of the GGUF file."""
    folder.mkdir(parents=True, exist_ok=True)
    loaded: Any = mx.load(str(source), return_metadata=True)
    tensors, values = loaded[0], metadata_of(loaded[1])
    config = folder_config(values, tied="output.weight" not in tensors)
    config["quantization"] = {"group_size": GROUP_SIZE, "bits": 4}
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for full_name, tensor in tensors.items():
        found = TENSOR.fullmatch(full_name)
        count = heads.get(found["name"]) if found else None
        weights[weight_name(full_name)] = in_order(tensor, count) if count else tensor
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    write_folder_vocabulary(values, folder)
    return folder


def weight_name(gguf_name: str) -> str:
    """The name of a tensor in a folder."""
    found = TENSOR.fullmatch(gguf_name)
    assert found, gguf_name
    layer, name, part = found.groups()
    prefix = f"model.layers.{layer}." if layer else ""
    return NAMES[name].join((prefix, f".{part}"))


def folder_config(values: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    of_llama = {name.removeprefix("llama."): value for name, value in values.items()}
    return {
        "model_type": "llama",
        "hidden_size": of_llama["embedding_length"],
        "num_hidden_layers": of_llama["block_count"],
        "intermediate_size": of_llama["feed_forward_length"],
        "num_attention_heads": of_llama["attention.head_count"],
        "num_key_value_heads": of_llama["attention.head_count_kv"],
        "rms_norm_eps": of_llama["attention.layer_norm_rms_epsilon"],
        "vocab_size": len(values["tokenizer.ggml.tokens"]),
        "max_position_embeddings": of_llama["context_length"],
        "rope_theta": of_llama.get("rope.freq_base", 10_000.0),
        "tie_word_embeddings": tied,
        "bos_token_id": values["tokenizer.ggml.bos_token_id"],
        "eos_token_id": values["tokenizer.ggml.eos_token_id"],
    }


def in_order(tensor: mx.array, heads: int) -> mx.array:
    """Reorder rows for MLX's rotary embedding, which pairs the first half of a head with the
    second. GGUF files store the pairs next to each other."""
    rows, columns = tensor.shape
    pairs = tensor.reshape(heads, rows // heads // 2, 2, columns)
    return mx.contiguous(pairs.swapaxes(1, 2).reshape(rows, columns))
