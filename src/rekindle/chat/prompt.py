"""Represents prompts: tokens, the rendered text that they encode, and the span of each message.

A first turn finds its messages with a second render that has placeholders around each message. A
later turn keeps the spans of the earlier prompt and searches only the new text.
"""

from __future__ import annotations

import functools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

from rekindle.chat.escaping import Placeholders, escape_prefix, spans_from, unescape
from rekindle.chat.messages import Message
from rekindle.errors import TemplateFailed
from rekindle.tokens import MEDIA_BIT, Tokenizer, Tokens

Render = Callable[[Sequence[Message]], str]
ByteSpans = dict[int, tuple[int, int]]  # message index -> begin and end in the unescaped text
Pictures = Mapping[str, Tokens]  # the text of each picture in a prompt, and its tokens
NO_PICTURES: Pictures = MappingProxyType({})


class KnownPrefix(NamedTuple):
    """The beginning of a conversation as escaped bytes, and the tokens computed for it.

    The tokenizer would seldom choose the tokens that a reply was sampled as. When the text comes
    back, the sampled tokens are used again, because others would not match the KV state.
    """

    escaped: bytes
    tokens: Tokens


NO_PREFIX = KnownPrefix(b"", Tokens())
Recall = Callable[[bytes], KnownPrefix | None]  # the longest known prefix of escaped bytes


@dataclass(frozen=True, slots=True)
class MessageSpan:
    """Message `index` ends before token `end`. Its text begins in token `start`."""

    index: int
    role: str
    end: int
    start: int = 0
    start_byte: int = 0  # where its text begins in the unescaped text of the prompt


@dataclass(frozen=True, slots=True)
class Prompt:
    tokens: Tokens
    spans: tuple[MessageSpan, ...] = ()
    escaped: bytes = b""  # the rendered text, see escaping.py. Empty when the client sent token ids
    known_tokens: int = 0  # leading tokens that were recalled
    raw: bool = False  # its author may write control tokens
    pictures: Pictures = field(default_factory=dict)

    @property
    def placed_pictures(self) -> list[tuple[str, tuple[int, int]]]:
        """The text of each picture, with its first token and its end."""
        if not self.tokens.media:
            return []
        texts = [span.text for span in spans_from(self.escaped, 0) if span.picture]
        spans, placed = iter(self.tokens.media), []
        for text in texts:
            picture = self.pictures[text]
            first, *_ = (next(spans) for _ in picture.media)
            start = first.start - picture.media[0].start
            placed.append((text, (start, start + len(picture))))
        return placed


@dataclass(frozen=True, slots=True)
class ChatPrompt(Prompt):
    """A conversation's prompt. The next turn reuses results for messages that are the same."""

    messages: Sequence[Message] = ()
    tools: Sequence[Any] | None = None
    plain: frozenset[int] = frozenset()  # indices of messages without anything to escape
    plain_tools: frozenset[int] = frozenset()

    def same_messages(self, messages: Sequence[Message]) -> frozenset[int]:
        pairs = enumerate(zip(self.messages, messages, strict=False))
        return frozenset(index for index, (one, other) in pairs if one is other)


@dataclass(frozen=True, slots=True)
class TokenEdges:
    """Byte offsets of the edges between tokens."""

    offsets: Sequence[int]  # before each token and after the last. Empty if they are unknown
    first_token: int = 0  # the offsets begin with this token of the prompt
    first_byte: int = 0  # the position of the first edge in the text. Offsets count from here

    def message_spans(
        self, messages: Sequence[Message], byte_spans: ByteSpans
    ) -> tuple[MessageSpan, ...]:
        if not self.offsets:
            return ()
        return tuple(
            MessageSpan(
                index,
                str(messages[index].get("role", "")),
                end=self.first_token + bisect_left(self.offsets, end - self.first_byte),
                start=self.first_token + bisect_right(self.offsets, start - self.first_byte) - 1,
                start_byte=start,
            )
            for index, (start, end) in byte_spans.items()
            if start >= self.first_byte
        )


def token_offsets(pieces: Sequence[bytes], text: bytes) -> list[int]:
    """Byte offset before each token and after the last. Empty if the pieces spell another text."""
    if b"".join(pieces) != text:
        pieces = _without_added_spaces(pieces, text)
    return list(accumulate(map(len, pieces), initial=0)) if b"".join(pieces) == text else []


def _without_added_spaces(pieces: Sequence[bytes], text: bytes) -> list[bytes]:
    """The pieces without the spaces that SentencePiece adds in front of a text."""
    kept, at = [], 0
    for piece in pieces:
        kept.append(piece if text.startswith(piece, at) else piece.removeprefix(b" "))
        at += len(kept[-1])
    return kept


def is_character_boundary(text: bytes, at: int) -> bool:
    return at == len(text) or text[at] & 0xC0 != 0x80  # 10xxxxxx continues a UTF-8 character


class PromptEdges:
    """Locates tokens in the text of prompts, for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._piece = functools.cache(functools.partial(tokenizer.piece, special=True))

    def pieces(self, tokens: Tokens) -> list[bytes]:
        return [self._piece(token) if token < MEDIA_BIT else b"" for token in tokens]

    def of(self, prompt: Prompt, known: KnownPrefix = NO_PREFIX) -> TokenEdges:
        """The edges of all tokens, or of those after the known prefix.

        The tokens of a known prefix may spell another text than the rendered one.
        """
        pieces, text = self._prompt_pieces(prompt), unescape(prompt.escaped)
        is_bos_added = self._tokenizer.add_bos and prompt.tokens[:1].ids() == [self._tokenizer.bos]
        if is_bos_added and not prompt.escaped.startswith(pieces[0]):
            pieces[0] = b""
        if offsets := token_offsets(pieces, text):
            return TokenEdges(offsets)
        count, at_bytes = len(known.tokens), len(unescape(known.escaped))
        if not count:
            return TokenEdges(())
        return TokenEdges(token_offsets(pieces[count:], text[at_bytes:]), count, at_bytes)

    def _prompt_pieces(self, prompt: Prompt) -> list[bytes]:
        """The text of each token.

        The text of a picture is divided between its first and its last token, so that no message
        seems to begin or end inside the picture.
        """
        pieces = self.pieces(prompt.tokens)
        for text, (start, stop) in prompt.placed_pictures:
            inside = [b""] * (stop - start - 2)
            pieces[start:stop] = [text[:1].encode(), *inside, text[1:].encode()]
        return pieces

    def common(self, prompts: Sequence[Prompt]) -> Prompt:
        first, *others = prompts
        return self.first(first, min(first.tokens.common_prefix(each.tokens) for each in others))

    def first(self, prompt: Prompt, count: int) -> Prompt:
        """The first `count` tokens of a prompt, or fewer at a picture or inside a character."""
        offsets, text = self.of(prompt).offsets, unescape(prompt.escaped)
        inside = (start for _, (start, stop) in prompt.placed_pictures if start < count < stop)
        count = next(inside, count)
        while offsets and not is_character_boundary(text, offsets[count]):
            count -= 1
        # Without offsets, the tokens do not match the text.
        escaped = escape_prefix(spans_from(prompt.escaped, 0), offsets[count]) if offsets else b""
        spans = tuple(span for span in prompt.spans if span.end <= count)
        return Prompt(prompt.tokens[:count], spans, escaped, pictures=prompt.pictures)


def find_messages(messages: Sequence[Message], text: str, render: Render) -> ByteSpans:
    """Finds messages in the rendered `text` by a second render, with placeholders around them."""
    placeholders = Placeholders()
    placed = [
        {**each, "content": _enclosed(each["content"], placeholders.of(index))}
        if each.get("content")
        else each
        for index, each in enumerate(messages)
    ]
    try:
        rendered = render(placed)
    except TemplateFailed:
        return {}  # the template refuses only the placeholders, it has rendered the messages
    pieces: list[str] = []
    found: dict[int, list[int]] = {}
    at_bytes = 0
    for piece in placeholders.split(rendered):
        if isinstance(piece, int):
            found.setdefault(piece, []).append(at_bytes)
        else:
            pieces.append(piece)
            at_bytes += len(piece.encode())
    if "".join(pieces) != text:
        return {}
    # A message that is rendered twice has no unique position.
    return {index: (ends[0], ends[1]) for index, ends in found.items() if len(ends) == 2}


def _enclosed(content: Any, mark: str) -> Any:
    """Content with a mark around its text, inside the blanks at both ends, which templates trim."""
    parts = [{"text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list):
        return content
    parts = list(parts)
    texts = [index for index, part in enumerate(parts) if has_text(part)]
    if not texts:
        return content
    first, last = texts[0], texts[-1]
    text = parts[first]["text"]
    blanks = len(text) - len(text.lstrip())
    parts[first] = {**parts[first], "text": text[:blanks] + mark + text[blanks:]}
    text = parts[last]["text"]
    body = text.rstrip()
    parts[last] = {**parts[last], "text": body + mark + text[len(body) :]}
    return parts[0]["text"] if isinstance(content, str) else parts


def has_text(part: Any) -> bool:
    """Whether a content part has text that is not blank."""
    text = part.get("text") if isinstance(part, Mapping) else None
    return isinstance(text, str) and bool(text.strip())


def continued_spans(
    earlier: ChatPrompt,
    prompt: ChatPrompt,
    same: Container[int],
    pieces: Callable[[Tokens], list[bytes]],
) -> tuple[MessageSpan, ...] | None:
    """The spans of a prompt that continues an earlier one.

    The messages at the indices `same` are those of the earlier prompt. `pieces` returns the text
    of each token. None if the earlier spans and the new text do not determine the spans. Finding
    them without the earlier ones takes time that grows with the whole conversation.
    """
    common = earlier.tokens.common_prefix(prompt.tokens)
    kept = [span for span in earlier.spans if span.end <= common and span.index in same]
    if not kept:
        return None
    # Begin with the last token of the last kept message. The next message may begin inside it.
    first = max(span.end for span in kept) - 1
    dropped, added = earlier.tokens[first:], prompt.tokens[first:]
    if dropped.media or added.media:
        return None
    before, text = unescape(earlier.escaped), unescape(prompt.escaped)
    at = len(before) - sum(map(len, pieces(dropped)))
    if at < 0 or text[:at] != before[:at]:
        return None
    edges = TokenEdges(token_offsets(pieces(added), text[at:]), first, at)
    found = _locate(_to_locate(earlier, prompt.messages, kept, same), text, at)
    if found is None or not edges.offsets:
        return None
    return *kept, *edges.message_spans(prompt.messages, found)


def _to_locate(
    earlier: ChatPrompt,
    messages: Sequence[Message],
    kept: Sequence[MessageSpan],
    same: Container[int],
) -> Iterator[tuple[int, Message]]:
    """The messages without a kept span. Old ones that never had a span are skipped."""
    found, had = {span.index for span in kept}, {span.index for span in earlier.spans}
    for index, message in enumerate(messages):
        never_found = index in same and index not in had and index < max(found)
        if not never_found and index not in found:
            yield index, message


def _locate(messages: Iterable[tuple[int, Message]], text: bytes, at: int) -> ByteSpans | None:
    """Finds messages in order in a text from `at` on. None if one is absent or ambiguous."""
    spans: ByteSpans = {}
    for index, message in messages:
        content = message.get("content")
        parts: list[Any] = content if isinstance(content, list) else [{"text": content}]
        texts: list[str] = [part["text"].strip() for part in parts if has_text(part)]
        if not texts:
            continue
        first, last = (each.encode(errors="surrogatepass") for each in (texts[0], texts[-1]))
        start = end = _only_place(text, first, at)
        if start is not None and len(texts) > 1:
            end = _only_place(text, last, start + len(first))
        if start is None or end is None:
            return None
        at = end + len(last)
        spans[index] = (start, at)
    return spans


def _only_place(text: bytes, part: bytes, at: int) -> int | None:
    start = text.find(part, at)
    return start if start >= 0 and text.find(part, start + 1) < 0 else None
