"""A small byte-level vocabulary: 256 bytes, some merges, some control tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable

MERGES = [
    b" the",
    b" a",
    b"Hello",
    b"hello",
    b"user\n",
    b"assistant\n",
    b"system\n",
    b"\n\n",
    b".\n",
    b"\xc3\xa9",  # a whole character
    b"\xf0\x9f",  # the first half of one
    b"\x98\x80",  # the second half of another
    b"im_end",
    b"<|",
]
CONTROL = [
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
]


class Vocabulary:
    """Merges the longest first, from the left, and counts calls of `encode`."""

    def __init__(self, *, bos: str | None = None, add_bos: bool = False) -> None:
        self._bytes = [bytes([value]) for value in range(256)] + MERGES
        self._merges = re.compile(
            b"|".join(map(re.escape, sorted(MERGES, key=len, reverse=True))) + b"|.", re.DOTALL
        )
        self._ids = {piece: token for token, piece in enumerate(self._bytes)}
        self.control_texts = {text: len(self._bytes) + n for n, text in enumerate(CONTROL)}
        self._control = {token: text for text, token in self.control_texts.items()}
        self._split = re.compile("(" + "|".join(map(re.escape, CONTROL)) + ")")
        self.bos = self.control_texts[bos] if bos else None
        self.add_bos = add_bos
        self.size = len(self._bytes) + len(CONTROL)
        self.eos: int | None = None
        self.end_tokens = frozenset[int]()
        self.fim = None
        self.longest_bytes = max(map(len, [*MERGES, *(text.encode() for text in CONTROL)]))
        self.encoded: list[tuple[str, bool]] = []

    def encode(self, text: str, *, special: bool) -> list[int]:
        self.encoded.append((text, special))
        if not special:
            return self._plain(text)
        tokens: list[int] = []
        for part in self._split.split(text):
            control = self.control_texts.get(part)
            tokens += self._plain(part) if control is None else [control]
        return tokens

    def piece(self, token: int, *, special: bool) -> bytes:
        if token in self._control:
            return self._control[token].encode() if special else b""
        return self._bytes[token]

    def text(self, token: int | None) -> str:
        return "" if token is None else self.piece(token, special=True).decode(errors="replace")

    def spell(self, tokens: Iterable[int]) -> str:
        return b"".join(self.piece(token, special=True) for token in tokens).decode()

    def controls(self, tokens: Iterable[int]) -> list[str]:
        return [self._control[token] for token in tokens if token in self._control]

    def _plain(self, text: str) -> list[int]:
        return [self._ids[piece] for piece in self._merges.findall(text.encode())]


class SpacedVocabulary(Vocabulary):
    """Adds a space in front of every text between control tokens, as SentencePiece does."""

    def _plain(self, text: str) -> list[int]:
        return super()._plain(" " + text) if text else []
