"""A conversation recognised by its looks, for clients that give it no name.

Only a proposal: two conversations may look alike, and tokens decide what is reused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from blake3 import blake3

from rekindle.chat.content import Message

EDGE_CHARACTERS = 32


def fingerprint(messages: Sequence[Message]) -> str:
    """A digest of each message's role, length and both ends; of a reply, of its end alone.

    Clients strip a reply's reasoning, so that its length and beginning change.
    """
    hasher = blake3()
    for message in messages:
        for field in _fields(message):
            # Framed by its length: ("ab", "c") and ("a", "bc") never meet. A message has two
            # fields or four, by its role, which comes first.
            hasher.update(len(field).to_bytes(8, "big") + field)
    return hasher.hexdigest()


def previous(messages: Sequence[Message]) -> Sequence[Message]:
    """The conversation that a request goes on with: all before its last user message.

    Nothing when that is the first user message: a conversation begins.
    """
    users = [at for at, message in enumerate(messages) if message.get("role") == "user"]
    return messages[: users[-1]] if len(users) > 1 else ()


def _fields(message: Message) -> Iterator[bytes]:
    role, text = str(message.get("role", "")), _text(message.get("content"))
    yield _utf8(role)
    if role != "assistant":
        yield str(len(text)).encode()
        yield _utf8(text[:EDGE_CHARACTERS])
    yield _utf8(text[-EDGE_CHARACTERS:])


def _text(content: Any) -> str:
    """What is written in a message's content, in one string."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    texts = (part.get("text") for part in content if isinstance(part, Mapping))
    return "".join(text for text in texts if isinstance(text, str))


def _utf8(text: str) -> bytes:
    return text.encode(errors="surrogatepass")  # half a character is refused later, with a reason
