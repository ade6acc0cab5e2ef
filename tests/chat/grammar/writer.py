"""Replies as a model without any sense would write them: random logits, under a constraint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from rekindle.chat.grammar.lark import Grammar, json_grammar
from rekindle.chat.grammar.matcher import Constraint, Grammars

MERGES = [b'{"', b'": ', b'", "', b" the", b"<tool_call>", b"</tool_call>", b"\n\n"]
END = "<|im_end|>"
FAVOURED = np.array([*b'"}],'])  # what ends something: random strings would be endless


class ByteVocabulary:
    """256 bytes, some merges, the control tokens of a format, and two end tokens."""

    bos = eos = None
    add_bos = False
    longest_bytes = 16

    def __init__(self, control: Sequence[str] = ()) -> None:
        self.pieces = [bytes([value]) for value in range(256)] + MERGES
        texts = [END, "<|endoftext|>", *control]
        self.control_texts = {text: len(self.pieces) + n for n, text in enumerate(texts)}
        self._control = {token: text for text, token in self.control_texts.items()}
        self.size = len(self.pieces) + len(texts)
        self.end_tokens = frozenset(self.control_texts[text] for text in texts[:2])

    def text(self, token: int | None) -> str:
        return "" if token is None else self.piece(token, special=True).decode(errors="replace")

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Byte by byte, and control tokens where they are spelt and `special`."""
        tokens, rest = [], text
        while rest:
            found = next((each for each in self.control_texts if rest.startswith(each)), None)
            if special and found:
                tokens.append(self.control_texts[found])
                rest = rest[len(found) :]
            else:
                tokens += rest[0].encode()
                rest = rest[1:]
        return tokens

    def piece(self, token: int, *, special: bool) -> bytes:
        if token in self._control:
            return self._control[token].encode() if special else b""
        return self.pieces[token]

    def grammars(self) -> Grammars:
        return Grammars(self, vocabulary_size=self.size, end_tokens=self.end_tokens)


class Writer:
    """Writes replies of one vocabulary."""

    def __init__(self, control: Sequence[str] = ()) -> None:
        self.vocabulary = ByteVocabulary(control)
        self._grammars = self.vocabulary.grammars()

    def constraint(self, grammar: Grammar) -> Constraint:
        return self._grammars.constraint(grammar)

    def allowed(self, constraint: Constraint) -> set[int]:
        row = np.zeros(self.vocabulary.size, np.float32)
        constraint.mask(row)
        return set(np.flatnonzero(np.isfinite(row)).tolist())

    def takes(self, grammar: Grammar, text: str) -> bool:
        """Whether a reply may be exactly this text."""
        constraint = self.constraint(grammar)
        return self.follow(constraint, text) == text and bool(
            self.allowed(constraint) & self.vocabulary.end_tokens
        )

    def follow(self, constraint: Constraint, text: str) -> str:
        """As much of the text as the constraint lets through."""
        tokens = self.vocabulary.encode(text, special=True)
        for count, token in enumerate(tokens):
            if token not in self.allowed(constraint):
                return self.spell(tokens[:count])
            constraint.accept(token)
        return text

    def write(self, grammar: Grammar, seed: int, start: str = "", most: int = 3000) -> str:
        """A random reply that begins with `start` and comes to an end by itself."""
        constraint = self.constraint(grammar)
        assert self.follow(constraint, start) == start
        chance = np.random.default_rng(seed)
        tokens: list[int] = []
        for _ in range(most):
            row = chance.standard_normal(self.vocabulary.size).astype(np.float32)
            row[FAVOURED] += 2
            constraint.mask(row)
            token = int(row.argmax())
            constraint.accept(token)
            if token in self.vocabulary.end_tokens:
                assert constraint.trouble is None
                return start + self.spell(tokens)
            tokens.append(token)
        raise AssertionError(f"no end: {self.spell(tokens)[-200:]}")

    def write_json(self, schema: Any, seed: int) -> Any:
        return json.loads(self.write(json_grammar(schema, "response_format"), seed))

    def spell(self, tokens: Sequence[int]) -> str:
        pieces = (self.vocabulary.piece(token, special=True) for token in tokens)
        return b"".join(pieces).decode()
