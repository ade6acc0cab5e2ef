"""The model of a GGUF file with every weight as the number it stands for: llama.cpp computes with
such weights as they are, and rounds what is multiplied with quantised ones to 8 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np

from rekindle.models.bert_gguf import write_gguf
from tests.support.gguf_vocabulary import metadata_of


def write_gguf_as_float(source: Path, path: Path) -> Path:
    loaded: Any = mx.load(str(source), return_metadata=True)
    fields = {**metadata_of(loaded[1]), "general.file_type": 0}  # all of it F32
    tensors = {
        each.name: gguf.dequantize(each.data, each.tensor_type)
        .astype(np.float32)
        .reshape([int(size) for size in reversed(each.shape)])
        for each in gguf.GGUFReader(source).tensors
    }
    write_gguf(path, fields, tensors)
    return path
