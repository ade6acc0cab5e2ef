"""Message spans in bytes and in tokens. tests/chat/test_encode.py tests them in whole prompts."""

from __future__ import annotations

from typing import Any

import pytest

from rekindle.chat.messages import Message
from rekindle.chat.prompt import MessageSpan, TokenEdges, find_messages, token_offsets
from rekindle.errors import TemplateFailed

TALK: list[dict[str, Any]] = [
    {"role": "user", "content": " é \n"},
    {"role": "assistant", "content": None},
    {"role": "user", "content": [{"text": "a"}, {"type": "image"}, {"text": "b"}]},
]


def render(messages: Any) -> str:
    def text(content: Any) -> str:
        parts = content if isinstance(content, list) else [{"text": content or ""}]
        return "".join(part.get("text", "") for part in parts)

    return "".join(f"[{text(message['content'])}]" for message in messages)


def test_messages_are_found_by_their_text_without_the_blanks_around_it() -> None:
    text = render(TALK)
    found = find_messages(TALK, text, render)
    raw = text.encode()
    assert {index: raw[start:end].decode() for index, (start, end) in found.items()} == {
        0: "é",
        2: "ab",
    }


def test_nothing_is_found_where_the_template_does_not_take_placeholders() -> None:
    def refuse(messages: list[Message]) -> str:
        raise TemplateFailed("no")

    assert find_messages(TALK, render(TALK), lambda placed: refuse(list(placed))) == {}
    assert find_messages(TALK, render(TALK), lambda placed: render(placed) + "!") == {}
    assert find_messages(TALK, render(TALK) * 2, lambda placed: render(placed) * 2) == {}


@pytest.mark.parametrize(
    ("pieces", "text", "offsets"),
    [
        ([b"ab", b"c"], b"abc", [0, 2, 3]),
        ([b" ab", b" c"], b"ab c", [0, 2, 4]),  # SentencePiece put the first space there
        ([], b"", [0]),
        ([b"AB"], b"ab", []),  # a vocabulary that normalises
    ],
)
def test_tokens_have_offsets_where_they_are_the_text(
    pieces: list[bytes], text: bytes, offsets: list[int]
) -> None:
    assert token_offsets(pieces, text) == offsets


def test_a_span_reaches_from_the_token_it_begins_in_to_the_token_it_ends_in() -> None:
    edges = TokenEdges([0, 2, 4, 6], first_token=10, first_byte=100)
    messages = [{"role": "system"}, {"role": "user"}, {"role": "user"}]
    spans = edges.message_spans(messages, {0: (90, 99), 1: (100, 103), 2: (103, 106)})
    assert spans == (
        # The one before the first edge is left out.
        MessageSpan(1, "user", end=12, start=10, start_byte=100),
        MessageSpan(2, "user", end=13, start=11, start_byte=103),
    )
    assert TokenEdges(()).message_spans(messages, {1: (0, 1)}) == ()
