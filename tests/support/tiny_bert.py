"""Writes tiny random BERT models with a WordPiece vocabulary of letters and a few words."""

from __future__ import annotations

from pathlib import Path
from string import ascii_lowercase
from typing import Any

import gguf
import numpy as np

WIDTH, HIDDEN, HEADS = 64, 128, 4
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
WORDS = ("the", "cat", "sat", "mat", "dog", "rain", ".", ",")
CLS, SEP = SPECIAL.index("[CLS]"), SPECIAL.index("[SEP]")
TOKENS = (
    *SPECIAL,
    *(f"\u2581{word}" for word in (*WORDS, *ascii_lowercase)),  # at the start of a word
    *ascii_lowercase,  # inside a word
)


def write_bert(
    path: Path,
    *,
    layers: int = 2,
    seed: int = 0,
    context: int = 128,
    classes: int = 0,
    pooling: int = gguf.PoolingType.MEAN,
    quantised: bool = False,
) -> Path:
    """With `classes`, the model has a head with this many scores instead of pooling."""
    writer: Any = gguf.GGUFWriter(str(path), "bert")
    random = np.random.default_rng(seed)

    def tensor(name: str, *shape: int) -> None:
        scale = shape[-1] ** -0.5 if len(shape) > 1 else 0.1
        values = (random.standard_normal(shape) * scale).astype(np.float32)
        if quantised and name.startswith("blk.") and len(shape) > 1:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
        tensor(f"{name}.bias", WIDTH)

    def linear(name: str, inputs: int, outputs: int) -> None:
        tensor(f"{name}.weight", outputs, inputs)
        tensor(f"{name}.bias", outputs)

    writer.add_context_length(context)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.RANK if classes else pooling)
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(list(TOKENS))
    writer.add_token_types([3 if token in SPECIAL else 1 for token in TOKENS])
    writer.add_token_type_count(2)
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(1)
    writer.add_bos_token_id(CLS)
    writer.add_sep_token_id(SEP)
    tensor("token_embd.weight", len(TOKENS), WIDTH)
    tensor("position_embd.weight", context, WIDTH)
    tensor("token_types.weight", 2, WIDTH)
    norm("token_embd_norm")
    for layer in range(layers):
        block = f"blk.{layer}."
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            linear(block + name, WIDTH, WIDTH)
        linear(block + "ffn_up", WIDTH, HIDDEN)
        linear(block + "ffn_down", HIDDEN, WIDTH)
        norm(block + "attn_output_norm")
        norm(block + "layer_output_norm")
    if classes:
        linear("cls", WIDTH, WIDTH)
        linear("cls.output", WIDTH, classes)
        writer.add_classifier_output_labels([str(each) for each in range(classes)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
