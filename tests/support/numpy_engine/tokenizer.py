"""A tokenizer of bytes and three control tokens, with a ChatML template."""

from __future__ import annotations

import re
from collections.abc import Mapping

CONTROL = ("<|im_end|>", "<|im_start|>", "<|endoftext|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CONTROL = re.compile(f"({'|'.join(map(re.escape, CONTROL))})")


class ByteTokenizer:
    size = len(CONTROL) + 256
    bos: int | None = None
    eos: int | None = 0
    add_bos = False
    end_tokens = frozenset({0, 2})
    longest_bytes = max(map(len, CONTROL))
    fim = None

    def __init__(self) -> None:
        self.control_texts: Mapping[str, int] = {text: n for n, text in enumerate(CONTROL)}

    def text(self, token: int | None) -> str:
        return "" if token is None else self.piece(token, special=True).decode(errors="replace")

    def encode(self, text: str, *, special: bool) -> list[int]:
        if not special:
            return [len(CONTROL) + byte for byte in text.encode(errors="replace")]
        tokens: list[int] = []
        for part in _CONTROL.split(text):
            control = self.control_texts.get(part)
            tokens += self.encode(part, special=False) if control is None else [control]
        return tokens

    def piece(self, token: int, *, special: bool) -> bytes:
        if token >= len(CONTROL):
            return bytes([token - len(CONTROL)])
        return CONTROL[token].encode() if special else b""
