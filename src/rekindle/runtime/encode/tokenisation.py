"""Tokenises and detokenises texts for clients, on an encoder thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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


def check_token_ids(ids: Iterable[int], tokenizer: Tokenizer, param: str) -> None:
    """Raise BadRequest unless all ids are tokens of this model."""
    last = tokenizer.size - 1
    if not all(0 <= token <= last for token in ids):
        raise BadRequest(f"token ids of this model go from 0 to {last}", param=param)


class Tokenisation:
    """`wrapped` adds the model's special tokens to a text. `chat` encodes a conversation; it is
    None for a model without conversations. Any thread may call this class.
    """

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
        """Answer an admin request, or return its error."""
        assert isinstance(request.op, Tokenize | Detokenize)
        try:
            return [AdminReply(request.id, self.answer(request.op))]
        except Exception as error:
            failure = as_server_error(error, "encoding the text").info
            return [AdminReply(request.id, error=failure)]

    def answer(self, op: Tokenize | Detokenize) -> Tokenized | Detokenized:
        """Raises BadRequest for messages or ids that this model does not take."""
        if isinstance(op, Detokenize):
            check_token_ids(op.tokens, self._tokenizer, "tokens")
            return Detokenized(b"".join(self._pieces(op.tokens)).decode(errors="replace"))
        tokens = self._tokens(op)
        return Tokenized(
            len(tokens),
            self._context_tokens,
            tokens if op.with_tokens else [],
            self._pieces(tokens) if op.with_pieces else [],
        )

    def _tokens(self, op: Tokenize) -> list[int]:
        if op.messages is not None:
            if self._chat is None:
                raise BadRequest("this model has no conversations: send a text", param="messages")
            return self._chat(op)
        assert op.text is not None, "the front sends messages or a text"
        encode = self._wrapped if op.add_special else self._tokenizer.encode
        return encode(op.text, special=op.parse_special)

    def _pieces(self, tokens: list[int]) -> list[bytes]:
        return [self._tokenizer.piece(token, special=True) for token in tokens]
