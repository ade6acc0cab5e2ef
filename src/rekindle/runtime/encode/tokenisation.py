"""Answers to questions about a model's tokens, on an encoder thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from rekindle.errors import BadRequest, as_server_error
from rekindle.protocol.admin import (
    AdminReply,
    AdminRequest,
    Detokenize,
    Detokenized,
    Tokenize,
    Tokenized,
)
from rekindle.tokens import Tokenizer

EncodeChat = Callable[[Tokenize], list[int]]


class EncodeText(Protocol):
    def __call__(self, text: str, *, special: bool) -> list[int]: ...


class Tokenisation:
    """`wrapped` encodes a text with what the model wants around it, `chat` a conversation; None:
    the model has no conversations. Any thread may call it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        context_tokens: int,
        wrapped: EncodeText,
        chat: EncodeChat | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._context_tokens = context_tokens
        self._wrapped = wrapped
        self._chat = chat

    def reply(self, request: AdminRequest) -> Sequence[AdminReply]:
        """An encoder thread: what becomes of an admin request that is about tokens."""
        assert isinstance(request.op, Tokenize | Detokenize)
        try:
            return [AdminReply(request.id, self.answer(request.op))]
        except Exception as error:
            failure = as_server_error(error, "encoding the text").info
            return [AdminReply(request.id, error=failure)]

    def answer(self, op: Tokenize | Detokenize) -> Tokenized | Detokenized:
        """Raises BadRequest for what has no tokens, or is none."""
        if isinstance(op, Tokenize):
            tokens = self._tokens(op)
            return Tokenized(
                len(tokens),
                self._context_tokens,
                tokens if op.with_tokens else [],
                self._pieces(tokens) if op.with_pieces else [],
            )
        most = self._tokenizer.size - 1
        if not all(0 <= token <= most for token in op.tokens):
            raise BadRequest(f"token ids of this model go from 0 to {most}", param="tokens")
        return Detokenized(b"".join(self._pieces(op.tokens)).decode(errors="replace"))

    def _tokens(self, op: Tokenize) -> list[int]:
        if op.messages is not None:
            if self._chat is None:
                raise BadRequest("this model has no conversations: send a text", param="messages")
            return self._chat(op)
        assert op.text is not None, "there are messages or a text"
        encode = self._wrapped if op.add_special else self._tokenizer.encode
        return encode(op.text, special=op.parse_special)

    def _pieces(self, tokens: list[int]) -> list[bytes]:
        return [self._tokenizer.piece(token, special=True) for token in tokens]
