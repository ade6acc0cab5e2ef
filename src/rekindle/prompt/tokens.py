"""Messages and text into tokens."""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

from rekindle.errors import BadRequest, TemplateFailed
from rekindle.prompt.content import Message
from rekindle.prompt.marker import Markers
from rekindle.prompt.quote import ControlTexts, Quotes, Span
from rekindle.prompt.template import ChatTemplate


class Tokenizer(Protocol):
    """What prompts need of a vocabulary."""

    @property
    def bos(self) -> int | None:
        """The token put in front of a prompt when `add_bos`."""

    @property
    def add_bos(self) -> bool: ...

    @property
    def control_texts(self) -> Mapping[str, int]:
        """The text of every control token."""

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Tokens without BOS; control-token text becomes control tokens only when `special`."""

    def piece(self, token: int, *, special: bool) -> bytes:
        """The bytes of a token; a control token has none unless `special`."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """Message `index` ends before token `end`."""

    index: int
    role: str
    end: int


@dataclass(frozen=True, slots=True)
class Prompt:
    tokens: tuple[int, ...]
    boundaries: tuple[Boundary, ...]


class Encoder:
    """Makes prompts for one model."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._control = ControlTexts(tokenizer.control_texts)
        self._piece = functools.cache(functools.partial(tokenizer.piece, special=True))

    def text(self, text: str) -> Prompt:
        """A plain completion's prompt; its author may write control tokens."""
        _utf8(text)
        tokens = self._tokenizer.encode(text, special=True)
        return Prompt((*self._bos(tokens), *tokens), boundaries=())

    def chat(
        self,
        messages: Sequence[Message],
        *,
        template_kwargs: Mapping[str, Any],
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> Prompt:
        """A conversation's prompt, in which only the template writes control tokens."""
        template = self._required_template()
        template.check(template_kwargs)
        quotes = Quotes(self._control)
        render = functools.partial(
            template.render,
            add_generation_prompt=add_generation_prompt,
            tools=quotes.hide(tools),
            **quotes.hide(template_kwargs),
        )
        hidden = quotes.hide(messages)
        spans = quotes.spans(render(hidden))
        text = "".join(span.text for span in spans)
        spelled = _utf8(text)
        tokens = self._encode(spans)
        bos = self._bos(tokens)
        pieces = [b"" for _ in bos] + [self._piece(token) for token in tokens]
        ends = _message_ends(hidden, text, lambda marked: quotes.restore(render(marked)))
        boundaries = _boundaries(messages, ends, _token_edges(pieces, spelled))
        return Prompt((*bos, *tokens), boundaries)

    def _required_template(self) -> ChatTemplate:
        if self._template is None:
            raise TemplateFailed(
                "This model has no chat template. Send it a prompt through /v1/completions."
            )
        return self._template

    def _encode(self, spans: Iterable[Span]) -> list[int]:
        encode = self._tokenizer.encode
        return [token for text, literal in spans for token in encode(text, special=not literal)]

    def _bos(self, tokens: Sequence[int]) -> list[int]:
        """What goes in front of `tokens`; nothing when the template wrote it already."""
        bos = self._tokenizer.bos
        if bos is None or not self._tokenizer.add_bos or bos in tokens[:1]:
            return []
        return [bos]


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest("The prompt is not valid Unicode: it holds half a character.") from error


def _message_ends(
    messages: Sequence[Message], text: str, render: Callable[[Sequence[Message]], str]
) -> dict[int, int]:
    """Byte offset of each message's end in `text`, as far as a marked render tells."""
    markers = Markers()
    try:
        return markers.ends(render(markers.place(messages)), text)
    except TemplateFailed:
        return {}  # the plain render went well: only the marks were in the way


def _boundaries(
    messages: Sequence[Message], ends: Mapping[int, int], edges: Sequence[int]
) -> tuple[Boundary, ...]:
    """Each known message end as the number of tokens that reach it."""
    if not edges:
        return ()
    return tuple(
        Boundary(index, str(messages[index].get("role", "")), bisect_left(edges, end))
        for index, end in ends.items()
    )


def _token_edges(pieces: Sequence[bytes], text: bytes) -> list[int]:
    """Byte offset in `text` of the edge in front of each token and of the last; or nothing.

    Pieces that spell another text (a normalising vocabulary) tell no offsets.
    """
    if b"".join(pieces) != text:
        pieces = _without_added_spaces(pieces, text)
    return list(accumulate(map(len, pieces), initial=0)) if b"".join(pieces) == text else []


def _without_added_spaces(pieces: Sequence[bytes], text: bytes) -> list[bytes]:
    """The pieces less the spaces that SentencePiece puts in front of a text by itself."""
    kept, at = [], 0
    for piece in pieces:
        kept.append(piece if text.startswith(piece, at) else piece.removeprefix(b" "))
        at += len(kept[-1])
    return kept
