"""A tiny model whose replies are nonsense, but end.

Its weights are random, as those of the tests are, with one direction of the embedding that all
tokens share. The rows of the output matrix for the end of a reply, and for what ends a string in
JSON, look along it: so they come once in some dozens of tokens, or in one dozen.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.support.tiny import (
    CONTROL,
    HEAD_WIDTH,
    HEADS,
    KV_HEADS,
    VOCABULARY,
    WIDTH,
    TinyModel,
)

SHARED = 6.0  # along the shared direction; the others are about one


class EndingModel(TinyModel):
    reply_ending = 0.5  # how much likelier than others its end is
    value_ending = 0.9  # and what ends a string or an object

    @property
    def vocabulary_size(self) -> int:
        return VOCABULARY

    @property
    def value_ends(self) -> list[int]:
        return [len(CONTROL) + ord('"'), len(CONTROL) + ord("}")]

    def matrix(self, name: str, columns: int, rows: int, scale: float | None = None) -> None:
        if name != "token_embd.weight":
            super().matrix(name, columns, rows, scale)
            return
        rows = self.vocabulary_size
        embedding = self._random.standard_normal((rows, columns)).astype(np.float32)
        output = self._random.standard_normal((rows, columns)).astype(np.float32) * columns**-0.5
        embedding[:, 0] = SHARED
        output[:, 0] = 0.0
        output[CONTROL.index("<|end|>"), 0] = self.reply_ending
        output[self.value_ends, 0] = self.value_ending
        self.writer.add_tensor(name, embedding)
        self.writer.add_tensor("output.weight", output)


def write_ending(
    path: Path, *, context: int = 8192, layers: int = 1, kind: type[EndingModel] = EndingModel
) -> Path:
    model = kind(path, "llama", layers, 0, context)
    model.number("attention.head_count", HEADS)
    model.number("attention.head_count_kv", KV_HEADS)
    model.number("rope.dimension_count", HEAD_WIDTH)
    model.ones("output_norm.weight", WIDTH)
    for layer in range(layers):
        block = f"blk.{layer}."
        model.ones(block + "attn_norm.weight", WIDTH)
        model.ones(block + "ffn_norm.weight", WIDTH)
        model.attention_and_hidden(block)
    model.finish()
    return path
