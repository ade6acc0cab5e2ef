"""Implements BERT in float64 as its paper describes it, independently of any engine.

Texts are tokenised by WordPiece.
"""

from __future__ import annotations

import unicodedata
from itertools import accumulate
from math import sqrt
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]

#: Abramowitz and Stegun, 7.1.26, which is accurate to seven digits.
ERF = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


class ReferenceBert:
    def __init__(self, path: Path) -> None:
        reader: Any = gguf.GGUFReader(path)
        self._weights = {each.name: np.asarray(each.data, np.float64) for each in reader.tensors}
        fields = {name: field.contents() for name, field in reader.fields.items()}
        self._layers: int = fields["bert.block_count"]
        self._heads: int = fields["bert.attention.head_count"]
        words: list[str] = fields["tokenizer.ggml.tokens"]
        kinds: list[int] = fields["tokenizer.ggml.token_type"]
        normal = 1
        self._ids = {
            word: token
            for token, (word, kind) in enumerate(zip(words, kinds, strict=True))
            if kind == normal
        }
        self._cls: int = fields["tokenizer.ggml.bos_token_id"]
        self._sep: int = fields["tokenizer.ggml.seperator_token_id"]
        self._unknown: int = fields["tokenizer.ggml.unknown_token_id"]

    def tokens(self, text: str) -> list[int]:
        pieces = [piece for word in _words(text) for piece in self._pieces(word)]
        return [self._cls, *pieces, self._sep]

    def _pieces(self, word: str) -> list[int]:
        found, start = [], 0
        while start < len(word):
            prefix = "" if start else "\u2581"
            for stop in range(len(word), start, -1):
                if (token := self._ids.get(prefix + word[start:stop])) is not None:
                    found.append(token)
                    start = stop
                    break
            else:
                return [self._unknown]
        return found

    def embed(self, texts: list[str]) -> Array:
        """Return one row per text."""
        inputs = [self.tokens(text) for text in texts]
        cuts = list(accumulate(map(len, inputs)))[:-1]  # the boundary between two texts
        weights = self._weights
        hidden = weights["token_embd.weight"][[token for tokens in inputs for token in tokens]]
        places = [place for tokens in inputs for place in range(len(tokens))]
        hidden = hidden + weights["position_embd.weight"][places]
        hidden = self._norm("token_embd_norm", hidden + weights["token_types.weight"][0])
        for layer in range(self._layers):
            block = f"blk.{layer}."
            attended = self._attend(block, hidden, cuts)
            hidden = self._norm(block + "attn_output_norm", hidden + attended)
            inner = self._linear(block + "ffn_up", hidden)
            inner = inner * (1 + _erf(inner / sqrt(2))) / 2
            outer = self._linear(block + "ffn_down", inner)
            hidden = self._norm(block + "layer_output_norm", hidden + outer)
        means = np.stack([part.mean(axis=0) for part in np.split(hidden, cuts)])
        vectors: Array = means / np.linalg.norm(means, axis=1, keepdims=True)
        return vectors

    def _attend(self, block: str, hidden: Array, cuts: list[int]) -> Array:
        query, key, value = (
            np.stack(np.split(self._linear(f"{block}attn_{name}", hidden), self._heads, axis=1))
            for name in "qkv"
        )
        texts = zip(*(np.split(each, cuts, axis=1) for each in (query, key, value)), strict=True)
        seen = np.concatenate([_attention(*text) for text in texts], axis=1)
        return self._linear(block + "attn_output", np.concatenate(list(seen), axis=1))

    def _linear(self, name: str, inputs: Array) -> Array:
        result: Array = inputs @ self._weights[f"{name}.weight"].T + self._weights[f"{name}.bias"]
        return result

    def _norm(self, name: str, values: Array) -> Array:
        centred = values - values.mean(axis=1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-12)
        result: Array = scaled * self._weights[f"{name}.weight"] + self._weights[f"{name}.bias"]
        return result


def _attention(query: Array, key: Array, value: Array) -> Array:
    scores = query @ key.transpose(0, 2, 1) / sqrt(query.shape[-1])
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    seen: Array = shares / shares.sum(axis=-1, keepdims=True) @ value
    return seen


def _erf(values: Array) -> Array:
    near = 1 / (1 + 0.3275911 * np.abs(values))
    polynomial = np.zeros_like(values)
    for factor in reversed(ERF):
        polynomial = (polynomial + factor) * near
    result: Array = np.sign(values) * (1 - polynomial * np.exp(-(values**2)))
    return result


def _words(text: str) -> list[str]:
    """Split into lower-case words without accents.

    Punctuation and ideographs are separate words.
    """
    plain = unicodedata.normalize("NFD", text.lower())
    kept = (character for character in plain if unicodedata.category(character) != "Mn")
    return "".join(f" {each} " if _is_word(each) else each for each in kept).split()


def _is_word(character: str) -> bool:
    is_symbol = character.isascii() and not character.isalnum() and not character.isspace()
    is_ideograph = "\u4e00" <= character <= "\u9fff"
    return is_symbol or is_ideograph or unicodedata.category(character).startswith("P")
