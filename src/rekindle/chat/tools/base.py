"""The interface of reply parsers, and what the parsers of all tool formats share."""

from __future__ import annotations

from typing import Protocol

from rekindle.chat.tools.reader import MarkerFinder, Steps, StreamReader
from rekindle.protocol.events import ArgumentsDelta, Part, TextDelta, ToolCallStart


class ReplyParser(Protocol):
    """Splits the text of one reply, which arrives in pieces of any size, into its parts.

    How the text was cut changes nothing but where text parts are cut. Nothing is lost: what turns
    out to be no call is text, and arguments that are not JSON are passed on unchanged.
    """

    @property
    def in_reasoning(self) -> bool:
        """Whether the next text is, as far as is known, still reasoning."""

    @property
    def ended_calls(self) -> int:
        """How many calls are complete."""

    def push(self, text: str) -> list[Part]:
        """The parts that became certain with this text."""

    @property
    def is_call_cut(self) -> bool:
        """Whether the reply was cut off in a call of which nothing was passed on."""

    def finish(self, *, cut: bool = False) -> list[Part]:
        """The rest, when no more text comes; with `cut`, the model had not ended its reply.

        Of a reply that was cut off, what may be the beginning of a marker or a call is no text.
        """


class TrailingSpace:
    """Holds back the whitespace at the end of a text until more text follows it."""

    def __init__(self) -> None:
        self._space: list[str] = []

    def add(self, text: str) -> str:
        """The text up to its last character that is not whitespace, with what was held back."""
        body = text.rstrip()
        if not body:
            self._space.append(text)
            return ""
        certain = "".join(self._space) + body
        self._space = [text[len(body) :]]
        return certain

    def take(self) -> str:
        """The whitespace held back so far."""
        space, self._space = "".join(self._space), []
        return space


class StreamParser:
    """A parser written as one generator over a StreamReader.

    Whitespace before a call, and whitespace alone after one, is dropped; all other text outside of
    calls is passed on.
    """

    opens = MarkerFinder()  # markers at which something other than text may begin
    closes: tuple[str, ...] = ()  # markers that end a call; before the first call they are text

    def __init__(self) -> None:
        self.in_reasoning = False
        self.ended_calls = 0
        self.is_call_cut = False
        self._cut = False
        self._reader = StreamReader()
        self._calls = 0
        self._trailing = TrailingSpace()
        self._only_space_since_call = False
        self._markers = MarkerFinder(*self.opens.markers, *self.closes)
        self._steps = self._run()

    def push(self, text: str) -> list[Part]:
        self._reader.feed(text)
        return self._advance()

    def finish(self, *, cut: bool = False) -> list[Part]:
        self._cut = cut
        self._reader.ended = True
        return self._advance()

    def _advance(self) -> list[Part]:
        parts: list[Part] = []
        for part in self._steps:
            if part is None:
                break
            parts.append(part)
        return parts

    def _run(self) -> Steps[None]:
        """Text, with a block at each opening marker."""
        while (marker := (yield from self._text_until_marker())) is not None:
            yield from self._block(marker)
        yield from self._flush()

    def _block(self, marker: str) -> Steps[None]:
        """Parse what follows an opening marker."""
        raise NotImplementedError

    def _text_until_marker(self) -> Steps[str | None]:
        """Pass on all text up to an opening marker, which is taken, or up to the end."""
        while True:
            text, marker = yield from self._reader.until(self._markers)
            yield from self._text(self._without_partial_marker(text, self._markers))
            if marker is None:
                if not text:
                    return None
                continue
            self._reader.skip(len(marker))
            if marker in self.opens.markers:
                return marker
            if not self._calls:
                yield from self._text(marker)

    def _text(self, text: str) -> list[Part]:
        certain = self._trailing.add(text)
        if not certain:
            return []
        self._only_space_since_call = False
        return [TextDelta(certain)]

    def _release_as_text(self) -> list[Part]:
        """What was held as a possible call is none: pass it on as text."""
        return self._possible_call(self._reader.release())

    def _possible_call(self, held: str) -> list[Part]:
        """Text, unless the reply was cut off before it was clear whether this is a call."""
        if self._is_cut_here and self._may_be_call(held):
            self.is_call_cut = True
            self._reader.rest()
            return []
        return self._text(held)

    @property
    def _is_cut_here(self) -> bool:
        return self._cut and self._reader.is_at_end

    def _may_be_call(self, held: str) -> bool:
        """Punctuation alone is as good as any other text, but not right after a call."""
        return _has_letter(held) or (self._only_space_since_call and bool(held.strip()))

    def _without_partial_marker(self, text: str, markers: MarkerFinder) -> str:
        """The text less a marker at its end that was cut off."""
        if not self._is_cut_here:
            return text
        end = markers.certain(text, 0)
        if end < len(text) and (self._only_space_since_call or _has_letter(text[end:])):
            self.is_call_cut = True
            return text[:end]
        return text

    def _flush(self) -> list[Part]:
        """What was held back, when no more text comes."""
        space = self._trailing.take()
        return [TextDelta(space)] if space and not self._only_space_since_call else []

    def _start_call(self, name: str) -> ToolCallStart:
        """A call is certain: what was held for it is not text any more."""
        self._reader.drop()
        self._trailing.take()
        self._only_space_since_call = True
        self._calls += 1
        return ToolCallStart(self._calls - 1, name)

    def _arguments(self, text: str) -> ArgumentsDelta:
        return ArgumentsDelta(self._calls - 1, text)

    def _end_call(self) -> None:
        self.ended_calls = self._calls

    def _raw_arguments(self, ends: MarkerFinder) -> Steps[None]:
        """Pass on, as arguments, all text up to a marker, which stays, less the space around it."""
        yield from self._reader.space()
        trailing, empty = TrailingSpace(), True
        while True:
            text, marker = yield from self._reader.until(ends)
            if certain := trailing.add(text):
                empty = False
                yield self._arguments(certain)
            if marker is not None or not text:
                break
        if empty:
            yield self._arguments("{}")
        self._end_call()


def _has_letter(text: str) -> bool:
    return any(map(str.isalpha, text))
