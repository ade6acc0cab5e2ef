"""Messages and text into tokens."""

from __future__ import annotations

import functools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Protocol

from rekindle.chat.content import Message
from rekindle.chat.escaping import (
    ControlTexts,
    Quotes,
    Span,
    mark,
    mark_beginning,
    shared_length,
    spans_from,
    unmark,
)
from rekindle.chat.known_prefix import (
    Recall,
    Remembered,
    between_characters,
    encoded,
    head,
    spelled,
    tokens_after,
)
from rekindle.chat.message_spans import Markers
from rekindle.chat.template import ChatTemplate
from rekindle.errors import BadRequest, TemplateFailed

#: First messages of users, different enough that all they share is what any would.
PROBES = ("a", "\nb", " c", "1", "é", "“", ".")
PADDED = "needle \n"
NOTHING = Remembered(b"", ())


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
    """Message `index` ends before token `end`; its text begins with token `start` or in it."""

    index: int
    role: str
    end: int
    start: int = 0


@dataclass(frozen=True, slots=True)
class Prompt:
    tokens: tuple[int, ...]
    boundaries: tuple[Boundary, ...]
    marked: bytes = b""  # the rendered text with its literals marked; empty when tokens were sent
    remembered_tokens: int = 0  # leading tokens that were taken from memory
    raw: bool = False  # its author may write control tokens


class Encoder:
    """Makes prompts for one model."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._control = ControlTexts(tokenizer.control_texts)
        self._piece = functools.cache(functools.partial(tokenizer.piece, special=True))

    def text(self, text: str, *, recall: Recall | None = None) -> Prompt:
        """A plain completion's prompt; its author may write control tokens."""
        marked = _utf8(text)
        tokens, known = self._tokens([Span(text, literal=False)], marked, recall)
        return Prompt(tokens, (), marked, len(known.tokens), raw=True)

    def chat(
        self,
        messages: Sequence[Message],
        *,
        template_kwargs: Mapping[str, Any],
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        recall: Recall | None = None,
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
        _utf8(text)
        marked = mark(spans)
        tokens, known = self._tokens(spans, marked, recall)
        extents = _extents(hidden, text, lambda placed: quotes.restore(render(placed)))
        boundaries = _boundaries(messages, extents, *self._edges_after(known, tokens, marked))
        return Prompt(tokens, boundaries, marked, len(known.tokens))

    def prefix(
        self,
        messages: Sequence[Message],
        *,
        template_kwargs: Mapping[str, Any],
        tools: Sequence[Any] | None = None,
    ) -> Prompt:
        """What every conversation that begins with these messages begins with."""
        encode = functools.partial(
            self.chat, template_kwargs=template_kwargs, tools=tools, add_generation_prompt=False
        )
        probed = _probed(messages, encode)
        prompt = self._shared(probed) if probed else encode(messages)
        if probed and (plain := _plain(messages, encode)):
            # Up to where the messages themselves end: then a request for just them matches too.
            shorter = self._shared([prompt, plain])
            if plain.boundaries[-1].end <= len(shorter.tokens):
                prompt = shorter
        if set(prompt.tokens) <= {self._tokenizer.bos}:
            raise BadRequest(
                "The prompt renders to nothing before the first user message.", param="messages"
            )
        known = tuple(each for each in prompt.boundaries if each.index < len(messages))
        return replace(prompt, boundaries=known)

    def _shared(self, prompts: Sequence[Prompt]) -> Prompt:
        """What all of these begin with."""
        first, *others = prompts
        count = min(shared_length(first.tokens, other.tokens) for other in others)
        return self._beginning(first, count)

    def head(self, prompt: Prompt, reply: Sequence[int], delivered: str) -> Remembered | None:
        """What to remember after a turn whose client got `delivered`."""
        if not prompt.raw and self._trims:
            kept, _ = spelled(self._tokenizer, reply, delivered.rstrip().encode())
            reply = reply[:kept]
        return head(self._tokenizer, self._control, prompt, reply, delivered)

    def _required_template(self) -> ChatTemplate:
        if self._template is None:
            raise TemplateFailed(
                "This model has no chat template. Send it a prompt through /v1/completions."
            )
        return self._template

    @functools.cached_property
    def _trims(self) -> bool:
        """Whether the template takes blanks from the end of a reply."""
        talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PADDED}]
        try:
            rendered = self._required_template().render(talk, add_generation_prompt=False)
        except TemplateFailed:
            return True
        return PADDED not in rendered

    def _tokens(
        self, spans: Sequence[Span], marked: bytes, recall: Recall | None
    ) -> tuple[tuple[int, ...], Remembered]:
        """The prompt's tokens, and the beginning of it that was remembered."""
        known = recall(marked) if recall else None
        rest = tokens_after(self._tokenizer, self._control, known, marked) if known else None
        if known is not None and rest is not None:
            return (*known.tokens, *rest), known
        tokens = encoded(self._tokenizer, spans)
        return (*self._bos(tokens), *tokens), NOTHING

    def _bos(self, tokens: Sequence[int]) -> list[int]:
        """What goes in front of `tokens`; nothing when the template wrote it already."""
        bos = self._tokenizer.bos
        if bos is None or not self._tokenizer.add_bos or bos in tokens[:1]:
            return []
        return [bos]

    def _edges_after(
        self, known: Remembered, tokens: tuple[int, ...], marked: bytes
    ) -> tuple[list[int], int, int]:
        """Edges between tokens, and the token and the byte at which the first of them lies: the
        beginning, or where a head ends whose tokens spell another text than is shown."""
        if edges := self._edges(tokens, marked):
            return edges, 0, 0
        count, at_bytes = len(known.tokens), len(unmark(known.marked))
        pieces = [self._piece(token) for token in tokens[count:]]
        return _token_edges(pieces, unmark(marked)[at_bytes:]), count, at_bytes

    def _edges(self, tokens: tuple[int, ...], marked: bytes) -> list[int]:
        """Byte offset in the text of the edge in front of each token and of the last; or none."""
        pieces = [self._piece(token) for token in tokens]
        bos = self._tokenizer.bos
        if tokens[:1] == (bos,) and self._tokenizer.add_bos and not marked.startswith(pieces[0]):
            pieces[0] = b""  # added: the text does not spell it
        return _token_edges(pieces, unmark(marked))

    def _beginning(self, prompt: Prompt, count: int) -> Prompt:
        """The prompt up to a token; without marked bytes where tokens do not spell the text."""
        edges, text = self._edges(prompt.tokens, prompt.marked), unmark(prompt.marked)
        while edges and not between_characters(text, edges[count]):
            count -= 1
        marked = mark_beginning(spans_from(prompt.marked, 0), edges[count]) if edges else b""
        boundaries = tuple(each for each in prompt.boundaries if each.end <= count)
        return Prompt(prompt.tokens[:count], boundaries, marked)


def _plain(
    messages: Sequence[Message], encode: Callable[[Sequence[Message]], Prompt]
) -> Prompt | None:
    """The messages by themselves, if the template takes them so and shows the last one."""
    try:
        prompt = encode(messages)
    except TemplateFailed:
        return None
    ends = prompt.boundaries
    return prompt if ends and ends[-1].index == len(messages) - 1 else None


def _probed(
    messages: Sequence[Message], encode: Callable[[Sequence[Message]], Prompt]
) -> list[Prompt]:
    """The messages with one probe after each other; nothing where no user may speak next."""
    if messages and messages[-1].get("role") == "user":
        return []
    try:
        return [encode([*messages, {"role": "user", "content": probe}]) for probe in PROBES]
    except TemplateFailed:
        return []


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest("The prompt is not valid Unicode: it holds half a character.") from error


def _extents(
    messages: Sequence[Message], text: str, render: Callable[[Sequence[Message]], str]
) -> dict[int, tuple[int, int]]:
    """Byte offsets of each message in `text`, as far as a marked render tells."""
    markers = Markers()
    try:
        return markers.extents(render(markers.place(messages)), text)
    except TemplateFailed:
        return {}  # the plain render went well: only the marks were in the way


def _boundaries(
    messages: Sequence[Message],
    extents: Mapping[int, tuple[int, int]],
    edges: Sequence[int],
    first: int,
    at_bytes: int,
) -> tuple[Boundary, ...]:
    """Each message that lies between these edges, in tokens: how many reach its end, and how many
    come before it."""
    if not edges:
        return ()
    return tuple(
        Boundary(
            index,
            str(messages[index].get("role", "")),
            end=first + bisect_left(edges, end - at_bytes),
            start=first + bisect_right(edges, start - at_bytes) - 1,
        )
        for index, (start, end) in extents.items()
        if start >= at_bytes
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
