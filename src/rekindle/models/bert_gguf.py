"""Writes a BERT of sentence-transformers as a GGUF file: weights, vocabulary and pooling."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rekindle.models.gguf_writer import Field, GgufTensor, write_gguf
from rekindle.models.safetensors import read_header

TENSOR_KINDS = {np.dtype(np.float32): 0, np.dtype(np.float16): 1}  # ggml's type ids

Tensor = np.ndarray[Any, Any]

CONFIG, VOCABULARY, WEIGHTS = "config.json", "vocab.txt", "model.safetensors"
NORMAL, CONTROL, UNUSED = 1, 3, 5  # token types
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORD_START = "\u2581"  # WordPiece instead marks with ## that a piece continues a word

BODY = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
}
LAYER = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
LOOKED_UP = ("position_embd", "token_types")  # stay f32, because they are never multiplied


def write_bert_gguf(name: str, folder: Path, path: Path, advance: Callable[[int], None]) -> None:
    """Convert the verified files in `folder` to a GGUF file at `path`."""
    config = json.loads((folder / CONFIG).read_text())
    words = (folder / VOCABULARY).read_text(encoding="utf-8").rstrip("\n").split("\n")
    tensors = _tensors(_safetensors(folder / WEIGHTS), config["num_hidden_layers"])
    described = [gguf_tensor(*each) for each in tensors.items()]
    write_gguf(path, _fields(name, config, words), described, advance)


def gguf_tensor(name: str, array: Tensor) -> GgufTensor:
    """Describe an array of f32 or f16."""
    kind = TENSOR_KINDS[array.dtype]
    return GgufTensor(name, array.shape, kind, lambda: iter([array.tobytes()]))


def _fields(name: str, config: dict[str, Any], words: list[str]) -> dict[str, Field]:
    kinds = [_kind(word) for word in words]
    return {
        "general.architecture": "bert",
        "general.name": name,
        "bert.context_length": config["max_position_embeddings"],
        "bert.embedding_length": config["hidden_size"],
        "bert.block_count": config["num_hidden_layers"],
        "bert.feed_forward_length": config["intermediate_size"],
        "bert.attention.head_count": config["num_attention_heads"],
        "bert.attention.layer_norm_epsilon": float(config["layer_norm_eps"]),
        "bert.attention.causal": False,
        "bert.pooling_type": 1,  # mean
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [_spelled(*each) for each in zip(words, kinds, strict=True)],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.token_type_count": config["type_vocab_size"],
        "tokenizer.ggml.padding_token_id": words.index("[PAD]"),
        "tokenizer.ggml.unknown_token_id": words.index("[UNK]"),
        "tokenizer.ggml.bos_token_id": words.index("[CLS]"),
        "tokenizer.ggml.seperator_token_id": words.index("[SEP]"),  # the spelling of the format
        "tokenizer.ggml.mask_token_id": words.index("[MASK]"),
    }


def _kind(word: str) -> int:
    if word in SPECIAL:
        return CONTROL
    return UNUSED if word.startswith("[unused") else NORMAL


def _spelled(word: str, kind: int) -> str:
    if kind != NORMAL:
        return word
    return word[2:] if word.startswith("##") else WORD_START + word


def _tensors(weights: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    names = dict(BODY)
    for layer in range(layers):
        names |= {f"encoder.layer.{layer}.{a}": f"blk.{layer}.{b}" for a, b in LAYER.items()}
    tensors = {}
    for theirs, ours in names.items():
        for part in ("weight", "bias"):
            tensor = weights.get(f"{theirs}.{part}")
            if tensor is not None:
                is_matrix = tensor.ndim > 1 and ours not in LOOKED_UP
                tensors[f"{ours}.{part}"] = tensor.astype(np.float16) if is_matrix else tensor
    return tensors


def _safetensors(path: Path) -> dict[str, Tensor]:
    return {
        name: np.memmap(path, np.float32, "r", tensor.start, tensor.shape)
        for name, tensor in read_header(path).tensors.items()
        if tensor.dtype == "F32"
    }
