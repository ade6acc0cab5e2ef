"""Message spans: which bytes of a rendered conversation, and which tokens, each message takes."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from rekindle.chat.escaping import Placeholders
from rekindle.chat.messages import Message
from rekindle.errors import TemplateFailed
from rekindle.tokens import Tokens

Render = Callable[[Sequence[Message]], str]
ByteSpans = dict[int, tuple[int, int]]  # begin and end in the text, by the index of the message


@dataclass(frozen=True, slots=True)
class MessageSpan:
    """Message `index` ends before token `end`; its text begins with token `start` or in it."""

    index: int
    role: str
    end: int
    start: int = 0
    start_byte: int = 0  # of its text, in the unescaped text of the prompt


@dataclass(frozen=True, slots=True)
class TokenEdges:
    """Byte offsets in a text of the edges between tokens, from one token of a prompt on."""

    offsets: Sequence[int]  # before each token, and after the last; none: they are not known
    first_token: int = 0
    first_byte: int = 0  # of the whole text; offsets count from here

    def message_spans(
        self, messages: Sequence[Message], byte_spans: ByteSpans
    ) -> tuple[MessageSpan, ...]:
        """The messages that lie between these edges."""
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
    """Byte offset in `text` before each token and after the last one.

    Nothing when the pieces are another text, as with a vocabulary that normalises.
    """
    if b"".join(pieces) != text:
        pieces = _without_added_spaces(pieces, text)
    return list(accumulate(map(len, pieces), initial=0)) if b"".join(pieces) == text else []


def _without_added_spaces(pieces: Sequence[bytes], text: bytes) -> list[bytes]:
    """The pieces without the spaces that SentencePiece puts in front of a text by itself."""
    kept, at = [], 0
    for piece in pieces:
        kept.append(piece if text.startswith(piece, at) else piece.removeprefix(b" "))
        at += len(kept[-1])
    return kept


def find_messages(messages: Sequence[Message], text: str, render: Render) -> ByteSpans:
    """Where each message is in `text`, the rendered conversation; as far as can be found out."""
    spans = MessageSpans()
    try:
        return spans.find(render(spans.place(messages)), text)
    except TemplateFailed:
        return {}  # it rendered the messages themselves: it refuses only the placeholders


class MessageSpans:
    """Placeholders around each message's text, to be found again in the rendered conversation."""

    def __init__(self) -> None:
        self._placeholders = Placeholders()

    def place(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with their placeholders; one without text stays as it is."""
        return [
            {**message, "content": self._enclose(message.get("content"), index)}
            if message.get("content")
            else message
            for index, message in enumerate(messages)
        ]

    def find(self, rendered: str, text: str) -> ByteSpans:
        """Where each message is in `text`, which is what `rendered` is without placeholders;
        nothing when the template rendered something else because of them."""
        pieces: list[str] = []
        found: dict[int, list[int]] = {}
        at_bytes = 0
        for piece in self._placeholders.split(rendered):
            if isinstance(piece, int):
                found.setdefault(piece, []).append(at_bytes)
            else:
                pieces.append(piece)
                at_bytes += len(piece.encode())
        if "".join(pieces) != text:
            return {}
        # A message that is rendered twice has no one place.
        return {
            index: (places[0], places[1]) for index, places in found.items() if len(places) == 2
        }

    def _enclose(self, content: Any, index: int) -> Any:
        if isinstance(content, str):
            return self._enclose_text(content, index)
        if not isinstance(content, list):
            return content
        parts = list(content)
        texts = [place for place, part in enumerate(parts) if has_text(part)]
        for place in texts[:1]:
            parts[place] = {**parts[place], "text": self._begin(parts[place]["text"], index)}
        for place in texts[-1:]:
            parts[place] = {**parts[place], "text": self._end(parts[place]["text"], index)}
        return parts

    def _enclose_text(self, text: str, index: int) -> str:
        return self._end(self._begin(text, index), index) if text.strip() else text

    # Templates trim, so placeholders stand inside the blanks around a text.

    def _begin(self, text: str, index: int) -> str:
        blanks = len(text) - len(text.lstrip())
        return text[:blanks] + self._placeholders.of(index) + text[blanks:]

    def _end(self, text: str, index: int) -> str:
        body = text.rstrip()
        return body + self._placeholders.of(index) + text[len(body) :]


def has_text(part: Any) -> bool:
    """Whether it is a part with text that is not blank."""
    text = part.get("text") if isinstance(part, Mapping) else None
    return isinstance(text, str) and bool(text.strip())


# ----------------------------------------------------------------------
# Message spans of a conversation that goes on: those found before hold, the rest is looked for.
#
# Finding them anew takes a second render and the place of every token, which grows with the whole
# conversation; here only what comes after the tokens that both prompts begin with is looked at.

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
