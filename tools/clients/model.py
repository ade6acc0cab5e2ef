"""Writes a tiny model with a large context, for programs with long prompts.

Its vocabulary is trained on this project's documents, so a token has three or four bytes, as in
real models. Its replies are nonsense, but they end.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import gguf
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from tests.support.ending_model import EndingModel, write_ending
from tests.support.tiny import CONTROL, TEMPLATE, spelling

CONTEXT_TOKENS = 131_072
LEARNT_TOKENS = 2048
LINE_BREAK = spelling(ord("\n")).decode()
DOCUMENTS = Path(__file__).parents[2] / "docs"


class TrainedVocabulary(EndingModel):
    ending = 1.2

    @cached_property
    def _learnt(self) -> dict[str, Any]:
        """Train a byte-level vocabulary and its merges."""
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

    @property
    def vocabulary_size(self) -> int:
        return len(self._tokens)

    @property
    def ends(self) -> list[int]:
        return [self._tokens.index(each) for each in ("<|end|>", '"', "}")]

    @property
    def line_break(self) -> int:
        return self._tokens.index(LINE_BREAK)


def write_model(path: Path) -> Path:
    """Write the model as a GGUF file."""
    return write_ending(path, context=CONTEXT_TOKENS, kind=TrainedVocabulary)
