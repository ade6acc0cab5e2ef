"""Prompts: tokens, and what is known of the text that they stand for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from types import MappingProxyType
from typing import Any, NamedTuple

from rekindle.chat.escaping import ControlTexts, Span, escape_prefix, spans_from, unescape
from rekindle.chat.images import pictures_in
from rekindle.chat.message_spans import MessageSpan, TokenEdges, token_offsets
from rekindle.chat.messages import Message
from rekindle.tokens import MEDIA_BIT, Tokenizer, Tokens

# ----------------------------------------------------------------------
# Known prefixes: the beginning of a conversation as rendered bytes and the tokens computed for it.
#
# The tokens of a sampled reply are seldom those that the tokenizer would choose for the same text.
# When the text comes back, the sampled tokens are used again; others would not match the KV state.

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


# ----------------------------------------------------------------------
# Where the tokens of a prompt are in its text, and what several prompts begin with.

NOTHING = KnownPrefix(b"", Tokens())


class PromptEdges:
    """For the prompts of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._piece = functools.cache(functools.partial(tokenizer.piece, special=True))

    def texts(self, tokens: Tokens) -> list[bytes]:
        """The text of each token; those of pictures have none."""
        return [self._piece(token) if token < MEDIA_BIT else b"" for token in tokens]

    def of(self, prompt: Prompt, known: KnownPrefix = NOTHING) -> TokenEdges:
        """Where the tokens are in the text: all of them, or, when those of the known prefix stand
        for another text than is rendered, those after it."""
        tokens, escaped = prompt.tokens, prompt.escaped
        pieces, text = self._pieces(prompt), unescape(escaped)
        if self._is_bos_added(tokens) and not escaped.startswith(pieces[0]):
            pieces[0] = b""
        if offsets := token_offsets(pieces, text):
            return TokenEdges(offsets)
        count, at_bytes = len(known.tokens), len(unescape(known.escaped))
        if not count:
            return TokenEdges(())
        return TokenEdges(token_offsets(pieces[count:], text[at_bytes:]), count, at_bytes)

    def _pieces(self, prompt: Prompt) -> list[bytes]:
        """The text of each token. What stands for a picture begins with its first token and ends
        with its last, so that no message seems to begin or end inside it."""
        pieces = self.texts(prompt.tokens)
        for text, (start, stop) in prompt.placed_pictures:
            inside = [b""] * (stop - start - 2)
            pieces[start:stop] = [text[:1].encode(), *inside, text[1:].encode()]
        return pieces

    def _is_bos_added(self, tokens: Tokens) -> bool:
        return self._tokenizer.add_bos and tokens[:1].ids() == [self._tokenizer.bos]

    def common(self, prompts: Sequence[Prompt]) -> Prompt:
        """What all of these begin with."""
        first, *others = prompts
        return self.first(first, min(first.tokens.common_prefix(each.tokens) for each in others))

    def first(self, prompt: Prompt, count: int) -> Prompt:
        """The prompt up to a token; without escaped bytes where tokens do not match the text."""
        offsets, text = self.of(prompt).offsets, unescape(prompt.escaped)
        inside = (start for _, (start, stop) in prompt.placed_pictures if start < count < stop)
        count = next(inside, count)
        while offsets and not is_character_boundary(text, offsets[count]):
            count -= 1
        escaped = escape_prefix(spans_from(prompt.escaped, 0), offsets[count]) if offsets else b""
        spans = tuple(span for span in prompt.spans if span.end <= count)
        return Prompt(prompt.tokens[:count], spans, escaped, pictures=prompt.pictures)
