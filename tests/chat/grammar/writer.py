"""Writes random replies that follow a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rekindle.chat.grammar.lark import Grammar, Rules
from rekindle.chat.grammar.matcher import GrammarCompiler, TokenMatcher
from rekindle.chat.grammar.reply import ReplyGrammars
from rekindle.chat.tools.registry import select

MERGES = [b'{"', b'": ', b'", "', b" the", b"<tool_call>", b"</tool_call>", b"\n\n"]
END = "<|im_end|>"
FAVOURED = np.array([*b'"}],'])  # what ends something: random strings would be endless


class ByteVocabulary:
    """256 bytes, some merges, the control tokens of a format, and two end tokens."""

    bos = eos = None
    add_bos = False
    longest_bytes = 16
    fim = None

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
        """Encodes byte by byte. If `special`, texts of control tokens become control tokens."""
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

    def compiler(self) -> GrammarCompiler:
        return GrammarCompiler(self, vocabulary_size=self.size, end_tokens=self.end_tokens)


def reply_grammars(
    tool_format: str, reasoning: str = "none", control: Mapping[str, int] | None = None
) -> ReplyGrammars:
    format = select(None, tool_format=tool_format, reasoning_format=reasoning)
    return format.grammars(control or {})


def json_grammar(schema: Mapping[str, Any], param: str = "response_format") -> Grammar:
    """A grammar of JSON that matches a schema."""
    rules = Rules({}, param)
    return rules.grammar(rules.json(schema))


class Writer:
    """Writes replies of one vocabulary."""

    def __init__(self, control: Sequence[str] = ()) -> None:
        self.vocabulary = ByteVocabulary(control)
        self._compiler = self.vocabulary.compiler()

    def matcher(self, grammar: Grammar) -> TokenMatcher:
        return self._compiler.compile(grammar)

    def allowed(self, matcher: TokenMatcher) -> set[int]:
        row = np.zeros(self.vocabulary.size, np.float32)
        matcher.mask(row)
        return set(np.flatnonzero(np.isfinite(row)).tolist())

    def takes(self, grammar: Grammar, text: str) -> bool:
        """Whether a reply may be exactly this text."""
        matcher = self.matcher(grammar)
        return self.follow(matcher, text) == text and bool(
            self.allowed(matcher) & self.vocabulary.end_tokens
        )

    def follow(self, matcher: TokenMatcher, text: str) -> str:
        """The longest prefix of the text that the grammar accepts."""
        tokens = self.vocabulary.encode(text, special=True)
        for count, token in enumerate(tokens):
            if token not in self.allowed(matcher):
                return self.spell(tokens[:count])
            matcher.accept(token)
        return text

    def write(self, grammar: Grammar, seed: int, start: str = "", most: int = 3000) -> str:
        """A random reply that begins with `start` and ends with an end token."""
        matcher = self.matcher(grammar)
        assert self.follow(matcher, start) == start
        chance = np.random.default_rng(seed)
        tokens: list[int] = []
        for _ in range(most):
            row = chance.standard_normal(self.vocabulary.size).astype(np.float32)
            row[FAVOURED] += 2
            matcher.mask(row)
            token = int(row.argmax())
            matcher.accept(token)
            if token in self.vocabulary.end_tokens:
                assert matcher.trouble is None
                return start + self.spell(tokens)
            tokens.append(token)
        raise AssertionError(f"no end: {self.spell(tokens)[-200:]}")

    def write_json(self, schema: Any, seed: int) -> Any:
        return json.loads(self.write(json_grammar(schema, "response_format"), seed))

    def spell(self, tokens: Sequence[int]) -> str:
        pieces = (self.vocabulary.piece(token, special=True) for token in tokens)
        return b"".join(pieces).decode()
