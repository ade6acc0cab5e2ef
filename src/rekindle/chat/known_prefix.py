"""What is remembered of a conversation: its rendered bytes, and the tokens that made them.

A sampled reply is made of tokens that the tokenizer would seldom choose for the same text. When
the text comes back, these tokens are taken again, or the state computed for them would not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

from rekindle.chat.escaping import ControlTexts, Span, mark_beginning, spans_from

if TYPE_CHECKING:  # the encoder recalls heads, so it imports this file
    from rekindle.chat.encode import Prompt, Tokenizer

ANCHOR = "\n"  # by itself in SentencePiece: no token holds it together with what follows


class Remembered(NamedTuple):
    """The beginning of a conversation, as marked bytes and as tokens."""

    marked: bytes
    tokens: Sequence[int]


#: The longest remembered head that these marked bytes begin with.
Recall = Callable[[bytes], Remembered | None]


def head(
    tokenizer: Tokenizer,
    control: ControlTexts,
    prompt: Prompt,
    reply: Sequence[int],
    delivered: str,
) -> Remembered | None:
    """What to remember after a turn whose client got `delivered`; nothing without a text.

    The client sends the whole of `delivered` back, so the whole decides which parts are literal.
    """
    if not prompt.marked:
        return None
    spans = list(control.split(delivered))
    if prompt.raw:
        # A completion's author may write control tokens: sent back, a literal becomes one.
        if control.across(prompt.marked.decode(), delivered):
            return None
        spans = list(takewhile(lambda span: not span.literal, spans))
    text = "".join(span.text for span in spans).encode()
    count, size_bytes = spelled(tokenizer, reply, text)
    marked = prompt.marked + mark_beginning(spans, size_bytes)
    return Remembered(marked, (*prompt.tokens, *reply[:count]))


def tokens_after(
    tokenizer: Tokenizer, control: ControlTexts, known: Remembered, marked: bytes
) -> list[int] | None:
    """The tokens of a prompt after a remembered head; None when that is no head of it."""
    at = len(known.marked)
    if not (known.marked and known.tokens and marked.startswith(known.marked)):
        return None
    if control.cut_at(marked, at):
        return None
    try:
        spans = spans_from(marked, at)
    except UnicodeDecodeError:
        return None
    in_text = bool(tokenizer.piece(known.tokens[-1], special=False))
    if not (spans and in_text and _adds_space(tokenizer)):
        return encoded(tokenizer, spans)
    first = _going_on(tokenizer, spans[0])
    return None if first is None else [*first, *encoded(tokenizer, spans[1:])]


def encoded(tokenizer: Tokenizer, spans: Iterable[Span]) -> list[int]:
    encode = tokenizer.encode
    return [token for text, literal in spans for token in encode(text, special=not literal)]


def _adds_space(tokenizer: Tokenizer) -> bool:
    """Whether it puts a space in front of a text, as SentencePiece does."""
    tokens = tokenizer.encode("a", special=False)
    return b"".join(tokenizer.piece(token, special=False) for token in tokens) == b" a"


def _going_on(tokenizer: Tokenizer, span: Span) -> list[int] | None:
    """Tokens of a text in the middle of another: without the space in front."""
    encode = partial(tokenizer.encode, special=not span.literal)
    anchor, tokens = encode(ANCHOR), encode(ANCHOR + span.text)
    return tokens[len(anchor) :] if tokens[: len(anchor)] == anchor else None


def spelled(tokenizer: Tokenizer, reply: Sequence[int], text: bytes) -> tuple[int, int]:
    """How many tokens of the reply spell whole characters of `text`, and how many bytes of it.

    It ends before a control token, which the client never saw, and where the client got something
    else: a stop string inside a token, a replacement for broken bytes.
    """
    count = size_bytes = at = 0
    for tried, token in enumerate(reply, start=1):
        piece = tokenizer.piece(token, special=False)
        if not piece or not text.startswith(piece, at):
            break
        at += len(piece)
        if between_characters(text, at):  # the rest has to be text again
            count, size_bytes = tried, at
    return count, size_bytes


def between_characters(text: bytes, at: int) -> bool:
    return at == len(text) or text[at] & 0xC0 != 0x80  # 10xxxxxx goes on with a character
