"""Message spans of a conversation that goes on: those found before hold, the rest is looked for.

Finding them anew takes a second render and the place of every token, which grows with the whole
conversation; here only what comes after the tokens that both prompts begin with is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from rekindle.chat.message_spans import (
    ByteSpans,
    MessageSpan,
    TokenEdges,
    has_text,
    token_offsets,
)
from rekindle.chat.messages import Message
from rekindle.tokens import Tokens

Pieces = Callable[[Tokens], list[bytes]]  # the text of each token


class Encoding(NamedTuple):
    """The text of a conversation without its escapes, and the tokens that stand for it."""

    text: bytes
    tokens: Tokens


def continued_spans(
    before: Encoding,
    spans: Sequence[MessageSpan],
    now: Encoding,
    messages: Sequence[Message],
    known: Container[int],
    pieces: Pieces,
) -> tuple[MessageSpan, ...] | None:
    """The spans of a prompt whose messages `known` are those of one before, which has `spans`.

    None when they cannot be told from these and from the new text alone.
    """
    common = before.tokens.common_prefix(now.tokens)
    kept = [span for span in spans if span.end <= common and span.index in known]
    if not kept:
        return None
    # From the last token of the last message that stays: the next one may begin inside of it.
    first = max(span.end for span in kept) - 1
    gone, rest = before.tokens[first:], now.tokens[first:]
    if gone.media or rest.media:
        return None
    at = len(before.text) - sum(map(len, pieces(gone)))
    if at < 0 or now.text[:at] != before.text[:at]:
        return None
    edges = TokenEdges(token_offsets(pieces(rest), now.text[at:]), first, at)
    places = locate(_wanted(messages, spans, kept, known), now.text, at)
    if places is None or not edges.offsets:
        return None
    return *kept, *edges.message_spans(messages, places)


def _wanted(
    messages: Sequence[Message],
    spans: Sequence[MessageSpan],
    kept: Sequence[MessageSpan],
    known: Container[int],
) -> Iterator[tuple[int, Message]]:
    """The messages to be looked for: new ones, those that stood where the prompts differ, and those
    after them that had no place there. One before them that had none has none."""
    found, had = {span.index for span in kept}, {span.index for span in spans}
    for index, message in enumerate(messages):
        is_old = index in known and index not in had and index < max(found)
        if not is_old and index not in found:
            yield index, message


def locate(messages: Iterable[tuple[int, Message]], text: bytes, at: int) -> ByteSpans | None:
    """Where messages, one after the other, are in a text from `at` on. None when one of them is
    not there as it is, or could be in two places."""
    spans: ByteSpans = {}
    for index, message in messages:
        ends = _ends(message.get("content"))
        if ends is None:
            continue
        first, last = ends
        start, end = _only_place(text, first, at), at
        if start is not None:
            last_start = start if last is first else _only_place(text, last, start + len(first))
            end = -1 if last_start is None else last_start + len(last)
        if start is None or end < 0:
            return None
        spans[index] = (start, end)
        at = end
    return spans


def _ends(content: Any) -> tuple[bytes, bytes] | None:
    """The first and the last text of a message, without blanks around it; None: it has none."""
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [
        part["text"].strip().encode(errors="surrogatepass") for part in parts if has_text(part)
    ]
    if not texts:
        return None
    return texts[0], texts[0] if len(texts) == 1 else texts[-1]


def _only_place(text: bytes, part: bytes, at: int) -> int | None:
    start = text.find(part, at)
    return start if start >= 0 and text.find(part, start + 1) < 0 else None
