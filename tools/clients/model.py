"""A tiny model with a large context whose replies are nonsense, but end.

Its weights are random, as those of the tests are, with one direction of the embedding that all
tokens share. The rows of the output matrix for the end of a reply, and for what ends a string in
JSON, look along it: so each of them comes about once in a dozen tokens.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.support.tiny import (
    CONTROL,
    HEAD_WIDTH,
    HEADS,
    KV_HEADS,
    WIDTH,
    TinyModel,
)

CONTEXT_TOKENS = 131_072
SHARED = 6.0  # along the shared direction; the others are about one
ENDING = 0.9
ENDS = [CONTROL.index("<|end|>"), len(CONTROL) + ord('"'), len(CONTROL) + ord("}")]


class EndingModel(TinyModel):
    def matrix(self, name: str, columns: int, rows: int, scale: float | None = None) -> None:
        if name != "token_embd.weight":
            super().matrix(name, columns, rows, scale)
            return
        embedding = self._random.standard_normal((rows, columns)).astype(np.float32)
        output = self._random.standard_normal((rows, columns)).astype(np.float32) * columns**-0.5
        embedding[:, 0] = SHARED
        output[:, 0] = 0.0
        output[ENDS, 0] = ENDING
        self.writer.add_tensor(name, embedding)
        self.writer.add_tensor("output.weight", output)


def write_model(path: Path) -> Path:
    """A file of GGUF."""
    model = EndingModel(path, "llama", 2, 0, CONTEXT_TOKENS)
    model.number("attention.head_count", HEADS)
    model.number("attention.head_count_kv", KV_HEADS)
    model.number("rope.dimension_count", HEAD_WIDTH)
    model.ones("output_norm.weight", WIDTH)
    for layer in range(model.layers):
        block = f"blk.{layer}."
        model.ones(block + "attn_norm.weight", WIDTH)
        model.ones(block + "ffn_norm.weight", WIDTH)
        model.attention_and_hidden(block)
    model.finish()
    return path
