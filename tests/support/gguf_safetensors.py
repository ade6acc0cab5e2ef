"""Writes the Llama model of a GGUF file as its authors would: a folder of F32 safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np

from tests.support.gguf_folder import TENSOR, folder_config, in_order, weight_name
from tests.support.gguf_vocabulary import metadata_of, write_folder_vocabulary


def write_gguf_as_safetensors(source: Path, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    loaded: Any = mx.load(str(source), return_metadata=True)
    values = metadata_of(loaded[1])
    tensors = gguf.GGUFReader(source).tensors
    config = folder_config(values, tied=all(each.name != "output.weight" for each in tensors))
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for each in tensors:
        found = TENSOR.fullmatch(each.name)
        assert found, each.name
        size = [int(side) for side in reversed(each.shape)]
        floats = gguf.dequantize(each.data, each.tensor_type).astype(np.float32).reshape(size)
        count, array = heads.get(found["name"]), mx.array(floats)
        weights[weight_name(each.name)] = in_order(array, count) if count else array
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})
    config |= {"architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    write_folder_vocabulary(values, folder)
    return folder
