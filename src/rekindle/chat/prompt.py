"""Prompts: tokens, and what is known of the text that they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rekindle.chat.known_prefix import Pictures
from rekindle.chat.message_spans import MessageSpan
from rekindle.chat.messages import Message
from rekindle.chat.pictures import pictures_in
from rekindle.tokens import Tokens


@dataclass(frozen=True, slots=True)
class Prompt:
    tokens: Tokens
    spans: tuple[MessageSpan, ...] = ()
    escaped: bytes = b""  # the rendered text, see escaping.py; empty when token ids were sent
    known_tokens: int = 0  # leading tokens that were recalled
    raw: bool = False  # its author may write control tokens
    pictures: Pictures = field(default_factory=dict)

    @property
    def placed_pictures(self) -> list[tuple[str, tuple[int, int]]]:
        """The texts that stand for its pictures, each with the first token and the end of it."""
        return pictures_in(self.tokens, self.escaped, self.pictures)


@dataclass(frozen=True, slots=True)
class ChatPrompt(Prompt):
    """The prompt of a conversation. One that goes on from it, with the same objects as messages and
    tools, takes over what was found out about them."""

    messages: Sequence[Message] = ()
    tools: Sequence[Any] | None = None
    plain: frozenset[int] = frozenset()  # the messages in which there is nothing to escape
    plain_tools: bool = False

    def same_messages(self, messages: Sequence[Message]) -> frozenset[int]:
        """The places of those that another conversation has there, too."""
        pairs = enumerate(zip(self.messages, messages, strict=False))
        return frozenset(place for place, (one, other) in pairs if one is other)
