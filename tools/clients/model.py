"""A tiny model with a large context whose replies are nonsense, but end.

Its weights are random, as those of the tests are, with one direction of the embedding that all
tokens share. The rows of the output matrix for the end of a reply, and for what ends a string in
JSON, look along it: so each of them comes about once in a dozen tokens. Its vocabulary is learnt
from the project's own documents: a prompt has a token for three or four bytes, as with real models.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from tests.support.tiny import (
    CONTROL,
    HEAD_WIDTH,
    HEADS,
    KV_HEADS,
    TEMPLATE,
    WIDTH,
    TinyModel,
)

CONTEXT_TOKENS = 131_072
LEARNT_TOKENS = 2048
SHARED = 6.0  # along the shared direction; the others are about one
ENDING = 1.2
ENDS = ("<|end|>", '"', "}")
DOCUMENTS = Path(__file__).parents[2] / "docs"


class EndingModel(TinyModel):
    @cached_property
    def _learnt(self) -> dict[str, Any]:
        """A byte-level vocabulary, and its merges."""
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(
            vocab_size=LEARNT_TOKENS,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        texts = (path.read_text() for path in sorted(DOCUMENTS.rglob("*.md")))
        tokenizer.train_from_iterator(texts, trainer)
        model: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
        return model

    @cached_property
    def _tokens(self) -> list[str]:
        vocabulary = self._learnt["vocab"]
        return [*CONTROL, *sorted(vocabulary, key=vocabulary.__getitem__)]

    def _add_vocabulary(self) -> None:
        kinds = [gguf.TokenType.CONTROL] * len(CONTROL)
        kinds += [gguf.TokenType.NORMAL] * (len(self._tokens) - len(CONTROL))
        self.writer.add_tokenizer_model("gpt2")
        self.writer.add_tokenizer_pre("gpt-2")
        self.writer.add_token_list(self._tokens)
        self.writer.add_token_types(kinds)
        self.writer.add_token_merges([" ".join(merge) for merge in self._learnt["merges"]])
        self.writer.add_eos_token_id(CONTROL.index("<|end|>"))
        self.writer.add_bos_token_id(CONTROL.index("<|turn|>"))
        self.writer.add_pad_token_id(CONTROL.index("<|pad|>"))
        self.writer.add_add_bos_token(False)
        self.writer.add_chat_template(TEMPLATE)

    def matrix(self, name: str, columns: int, rows: int, scale: float | None = None) -> None:
        if name != "token_embd.weight":
            super().matrix(name, columns, rows, scale)
            return
        rows = len(self._tokens)
        embedding = self._random.standard_normal((rows, columns)).astype(np.float32)
        output = self._random.standard_normal((rows, columns)).astype(np.float32) * columns**-0.5
        embedding[:, 0] = SHARED
        output[:, 0] = 0.0
        output[[self._tokens.index(each) for each in ENDS], 0] = ENDING
        self.writer.add_tensor(name, embedding)
        self.writer.add_tensor("output.weight", output)


def write_model(path: Path) -> Path:
    """A file of GGUF."""
    model = EndingModel(path, "llama", 1, 0, CONTEXT_TOKENS)
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
