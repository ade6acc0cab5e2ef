"""Rewrites a GGUF model with float weights.

llama.cpp multiplies float weights without rounding, while it rounds the other factor of quantised
weights to 8 bits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np

from rekindle.models.bert_gguf import gguf_tensor
from rekindle.models.gguf_writer import write_gguf
from tests.support.gguf_vocabulary import metadata_of


def write_gguf_as_float(source: Path, path: Path) -> Path:
    loaded: Any = mx.load(str(source), return_metadata=True)
    fields = {**metadata_of(loaded[1]), "general.file_type": 0}  # everything is F32
    tensors = [
        gguf_tensor(
            each.name,
            gguf.dequantize(each.data, each.tensor_type)
            .astype(np.float32)
            .reshape([int(size) for size in reversed(each.shape)]),
        )
        for each in gguf.GGUFReader(source).tensors
    ]
    write_gguf(path, fields, tensors)
    return path
