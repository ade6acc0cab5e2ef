"""Known prefixes: the beginning of a conversation as rendered bytes and the tokens computed for it.

The tokens of a sampled reply are seldom those that the tokenizer would choose for the same text.
When the text comes back, the sampled tokens are used again; others would not match the KV state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from types import MappingProxyType
from typing import NamedTuple

from rekindle.chat.escaping import ControlTexts, Span, escape_prefix, spans_from
from rekindle.tokens import MEDIA_BIT, Tokenizer, Tokens

ANCHOR = "\n"  # by itself in SentencePiece: no token holds it together with what follows


class KnownPrefix(NamedTuple):
    escaped: bytes
    tokens: Tokens


#: What pictures take in a prompt, by the text that stands for them there.
Pictures = Mapping[str, Tokens]
NO_PICTURES: Pictures = MappingProxyType({})

#: The longest known prefix of these escaped bytes.
Recall = Callable[[bytes], KnownPrefix | None]


def extended(
    tokenizer: Tokenizer, prefix: KnownPrefix, reply: Sequence[int], spans: Sequence[Span]
) -> KnownPrefix:
    """A prefix with the leading tokens of a reply whose client got the text of `spans`."""
    text = "".join(span.text for span in spans).encode()
    count, size_bytes = matching_tokens(tokenizer, reply, text)
    escaped = prefix.escaped + escape_prefix(spans, size_bytes)
    return KnownPrefix(escaped, prefix.tokens + Tokens.of(reply[:count]))


def completion_spans(control: ControlTexts, prompt: bytes, text: str) -> list[Span] | None:
    """The text of a plain completion up to its first literal: its author may write control tokens,
    so that the literal, sent back, becomes one. None when one begins in the prompt."""
    if control.across(prompt.decode(), text):
        return None
    return list(takewhile(lambda span: not span.literal, control.split(text)))


def tokens_after(
    tokenizer: Tokenizer,
    control: ControlTexts,
    known: KnownPrefix,
    escaped: bytes,
    pictures: Pictures = NO_PICTURES,
    *,
    spaced: bool,
) -> Tokens | None:
    """The tokens of a prompt after a known prefix; None when that is no prefix of it. `spaced`: the
    tokenizer puts a space in front of a text."""
    at = len(known.escaped)
    if not (known.escaped and known.tokens and escaped.startswith(known.escaped)):
        return None
    if control.cut_at(escaped, at):
        return None
    try:
        spans = spans_from(escaped, at)
    except UnicodeDecodeError:
        return None
    (last,) = known.tokens[-1:]
    in_text = last < MEDIA_BIT and bool(tokenizer.piece(last, special=False))
    if not (spans and in_text and spaced) or spans[0].picture:
        return tokenise(tokenizer, spans, pictures)
    first = _tokens_within(tokenizer, spans[0])
    rest = tokenise(tokenizer, spans[1:], pictures)
    return None if first is None else Tokens.of(first) + rest


def with_media(known: KnownPrefix, pictures: Pictures) -> KnownPrefix | None:
    """The prefix with the pictures in its tokens: those that come from disk have ids alone."""
    named = [pictures[span.text] for span in spans_from(known.escaped, 0) if span.picture]
    tokens = known.tokens.with_media([span for picture in named for span in picture.media])
    return known._replace(tokens=tokens) if tokens is not None else None


def tokenise(
    tokenizer: Tokenizer, spans: Iterable[Span], pictures: Pictures = NO_PICTURES
) -> Tokens:
    """Each span by itself; the tokens of a picture are known."""
    found, ids = Tokens(), list[int]()
    for span in spans:
        if span.picture:
            found, ids = found + Tokens.of(ids) + pictures[span.text], []
        else:
            ids += tokenizer.encode(span.text, special=not span.literal)
    return found + Tokens.of(ids)


def adds_space(tokenizer: Tokenizer) -> bool:
    """Whether it puts a space in front of a text, as SentencePiece does."""
    tokens = tokenizer.encode("a", special=False)
    return b"".join(tokenizer.piece(token, special=False) for token in tokens) == b" a"


def _tokens_within(tokenizer: Tokenizer, span: Span) -> list[int] | None:
    """The tokens of a text that follows another: without the space in front."""
    encode = partial(tokenizer.encode, special=not span.literal)
    anchor, tokens = encode(ANCHOR), encode(ANCHOR + span.text)
    return tokens[len(anchor) :] if tokens[: len(anchor)] == anchor else None


def matching_tokens(tokenizer: Tokenizer, reply: Sequence[int], text: bytes) -> tuple[int, int]:
    """How many tokens of the reply match whole characters of `text`, and how many bytes those are.

    They end before a control token, which the client never gets, and where the client got
    something else: because of a stop string inside a token, or a replacement for broken bytes.
    """
    count = size_bytes = at = 0
    for tried, token in enumerate(reply, start=1):
        piece = tokenizer.piece(token, special=False)
        if not piece or not text.startswith(piece, at):
            break
        at += len(piece)
        if is_character_boundary(text, at):  # what follows is tokenised as text
            count, size_bytes = tried, at
    return count, size_bytes


def is_character_boundary(text: bytes, at: int) -> bool:
    return at == len(text) or text[at] & 0xC0 != 0x80  # 10xxxxxx continues a character
