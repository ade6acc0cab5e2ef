"""Writes the files of a tiny random BERT in the format of sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from rekindle.models.bert_gguf import CONFIG, LAYER, SPECIAL, VOCABULARY, WEIGHTS

WIDTH, HIDDEN, LAYERS, CONTEXT = 32, 64, 2, 16
WORDS = (*SPECIAL, "[unused0]", "cat", "##s", "[", "\u2028")


def weights() -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    random = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (len(WORDS), WIDTH),
        "embeddings.position_embeddings.weight": (CONTEXT, WIDTH),
        "embeddings.token_type_embeddings.weight": (2, WIDTH),
        "embeddings.LayerNorm.weight": (WIDTH,),
        "embeddings.LayerNorm.bias": (WIDTH,),
    }
    wide = {"intermediate.dense": (HIDDEN, WIDTH), "output.dense": (WIDTH, HIDDEN)}
    for layer in range(LAYERS):
        for name in LAYER:
            shape = wide.get(name, (WIDTH, WIDTH))
            prefix = f"encoder.layer.{layer}.{name}"
            shapes[f"{prefix}.weight"] = (WIDTH,) if name.endswith("LayerNorm") else shape
            shapes[f"{prefix}.bias"] = shape[:1]
    return {
        name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
    }


def write_parts(folder: Path) -> dict[str, bytes]:
    """Write the files, and return their contents by name."""
    folder.mkdir()
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, tensor in weights().items():
        offsets = [len(data), len(data) + tensor.nbytes]
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": offsets}
        data += tensor.tobytes()
    described = json.dumps(header).encode()
    parts = {
        WEIGHTS: len(described).to_bytes(8, "little") + described + data,
        VOCABULARY: "".join(f"{word}\n" for word in WORDS).encode(),
        CONFIG: json.dumps(
            {
                "hidden_size": WIDTH,
                "intermediate_size": HIDDEN,
                "layer_norm_eps": 1e-12,
                "max_position_embeddings": CONTEXT,
                "num_attention_heads": 2,
                "num_hidden_layers": LAYERS,
                "type_vocab_size": 2,
            }
        ).encode(),
    }
    for name, content in parts.items():
        (folder / name).write_bytes(content)
    return parts
