"""Parses replies while they arrive: a reader of streamed text, and the base of all parsers."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rekindle.protocol.events import ArgumentsDelta, Part, TextDelta, ToolCallStart

T = TypeVar("T")

Reading = Generator[None, None, T]  # a read that yields None until the text it needs has arrived
Steps = Generator[Part | None, None, T]  # a read that also yields the parts it finds

Tools = Sequence[Mapping[str, Any]]

NAME = re.compile(r"[\w.:/-]*")  # of a function
SPACE = re.compile(r"\s*")


class MarkerFinder:
    """Finds the first of several markers. No marker may be a prefix of another.

    With `escapes`, a character after a backslash is never part of a marker.
    """

    def __init__(self, *markers: str, escapes: bool = False) -> None:
        self.markers, self.escapes = markers, escapes
        self.pattern = "|".join(map(re.escape, markers)) or "(?!)"
        escape = r"\\." if escapes else "(?!)"
        self._whole = re.compile(f"({self.pattern})|{escape}", re.DOTALL)
        starts = [_prefixes(marker[:-1]) for marker in markers if len(marker) > 1]
        starts += [r"\\"] * escapes
        self._part = re.compile(f"(?:{'|'.join(starts) or '(?!)'})\\Z")
        self._reach = max(map(len, markers), default=1)

    def find(self, text: str, at: int) -> tuple[int, str | None]:
        """The end of the text that certainly has no marker, and the marker there, if any."""
        for match in self._whole.finditer(text, at):
            if match[1] is not None:
                return match.start(), match[1]
            at = match.end()
        return self.certain(text, at), None

    def certain(self, text: str, at: int) -> int:
        """The start of the text's end that more text may turn into a marker."""
        part = self._part.search(text, max(at, len(text) - self._reach))
        return part.start() if part else len(text)


def _prefixes(text: str) -> str:
    """A pattern that matches every prefix of the text."""
    pattern = ""
    for character in reversed(text):
        pattern = re.escape(character) + (f"(?:{pattern})?" if pattern else "")
    return pattern


class StreamReader:
    """Holds text that has arrived and was not taken yet.

    Every method decides only by the text, never by where it was cut. Parsers built on it are
    therefore independent of the cuts, too.
    """

    def __init__(self, text: str = "", *, ended: bool = False) -> None:
        self.text = text
        self.at = 0
        self.ended = ended
        self._is_marker_cut = False  # the text ended inside an expected marker
        self._held: list[str] | None = None

    def feed(self, text: str) -> None:
        self.text = self.text[self.at :] + text
        self.at = 0

    @property
    def is_at_end(self) -> bool:
        """Whether everything was taken, except the beginning of an expected marker."""
        return self.ended and (self.at == len(self.text) or self._is_marker_cut)

    def hold(self, text: str = "") -> None:
        """Starts to record the taken text, beginning with `text`."""
        self._held = [text]

    def release(self) -> str:
        """Returns the text that was taken since `hold`."""
        held, self._held = self._held or [], None
        return "".join(held)

    def drop(self) -> None:
        self._held = None

    def peek(self) -> Reading[str]:
        """The next character, which is not taken. Empty at the end."""
        while self.at == len(self.text):
            if self.ended:
                return ""
            yield
        return self.text[self.at]

    def skip(self, characters: int) -> None:
        self.take(self.at + characters)

    def run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Takes all characters that match the pattern, a repeated character class."""
        taken = ""
        pieces: list[str] = []
        while True:
            match = pattern.match(self.text, self.at)
            if match and match.end() > self.at:
                taken = self.take(match.end())
                pieces.append(taken)
            if self.ended or self.at < len(self.text):
                return taken if len(pieces) < 2 else "".join(pieces)
            yield

    def space(self) -> Reading[str]:
        return self.run(SPACE)

    def starts(self, *markers: str) -> Reading[str | None]:
        """Takes the longest marker with which the text continues, if any."""
        marker = yield from self._next_of(markers)
        if marker is not None:
            self.skip(len(marker))
        return marker

    def at_marker(self, finder: MarkerFinder) -> Reading[bool]:
        """Whether the text continues with one of the markers, which is not taken."""
        return (yield from self._next_of(finder.markers)) is not None

    def _next_of(self, markers: tuple[str, ...]) -> Reading[str | None]:
        while True:
            found, waits = "", False
            for marker in markers:
                if self.text.startswith(marker, self.at):
                    found = max(found, marker, key=len)
                elif marker.startswith(self.text[self.at : self.at + len(marker)]):
                    waits = not self.ended  # only a part of it has arrived
                    self._is_marker_cut |= self.ended
            if not waits:
                return found or None
            yield

    def until(self, finder: MarkerFinder) -> Reading[tuple[str, str | None]]:
        """Takes some text without a marker. Returns it and the marker after it, which stays.

        Without a marker, more text follows. If the text is empty too, this is the end.
        """
        while True:
            end, marker = finder.find(self.text, self.at)
            if self.ended and marker is None:
                end = len(self.text)
            if end > self.at or marker is not None or self.ended:
                return self.take(end), marker
            yield

    def all_until(self, finder: MarkerFinder) -> Reading[tuple[str, str | None]]:
        """Takes all text up to a marker or the end. The marker stays."""
        pieces = []
        while True:
            text, marker = yield from self.until(finder)
            pieces.append(text)
            if marker is not None or not text:
                return "".join(pieces), marker

    def rest(self) -> str:
        return self.take(len(self.text))

    def take(self, end: int) -> str:
        """Takes the text up to the position `end`."""
        text = self.text[self.at : end]
        self.at = end
        if self._held is not None:
            self._held.append(text)
        return text


def completed(reading: Reading[T]) -> T:
    """The result of a read whose text has arrived completely."""
    try:
        next(reading)
    except StopIteration as stop:
        value: T = stop.value
        return value
    raise RuntimeError("the text has not ended")


class TrailingSpace:
    """Holds back whitespace at the end of a text until more text follows."""

    def __init__(self) -> None:
        self._space: list[str] = []

    def add(self, text: str) -> str:
        """The held whitespace and the text, without the whitespace at the end."""
        body = text.rstrip()
        if not body:
            self._space.append(text)
            return ""
        certain = "".join(self._space) + body
        self._space = [text[len(body) :]]
        return certain

    def take(self) -> str:
        space, self._space = "".join(self._space), []
        return space


@dataclass(frozen=True, slots=True)
class ReplyContext:
    """What a parser has to know about the reply that it will read."""

    tools: Tools
    calls: bool  # the reply may call tools
    opened: bool  # the prompt ends inside reasoning


def functions(tools: Tools) -> dict[str, Mapping[str, Any]]:
    found = [function for tool in tools if isinstance(function := tool.get("function"), Mapping)]
    return {each["name"]: each for each in found if isinstance(each.get("name"), str)}


class ReplyParser:
    """Splits the text of one reply, which arrives in pieces of any size, into its parts.

    This base passes everything on as text. For every parser, the cuts affect only where text parts
    are cut. Nothing is lost: text that is not a call after all becomes text, and arguments that are
    not JSON are passed on unchanged.
    """

    def __init__(self, reply: ReplyContext) -> None:
        self._reply = reply
        self.in_reasoning = False  # the next text is still reasoning, as far as is known
        self.ended_calls = 0  # number of complete calls
        self.is_call_cut = False  # the reply was cut off in a call before any of it was passed on

    def push(self, text: str) -> list[Part]:
        """The parts that this text makes final."""
        return [TextDelta(text)] if text else []

    def finish(self, *, cut: bool = False) -> list[Part]:
        """The remaining parts, at the end of the text.

        With `cut`, the model had not ended its reply. Then a possible beginning of a marker or a
        call at the end is dropped.
        """
        return []


class StreamParser(ReplyParser):
    """Base of parsers that are written as one generator over a StreamReader.

    Drops whitespace before a call, and whitespace that is the only text after one. Passes all other
    text outside of calls on.
    """

    opens = MarkerFinder()  # markers at which something other than text may begin
    closes: tuple[str, ...] = ()  # markers that end a call. Before the first call they are text
    begins_with_block = False  # a reply may begin with a block without a marker

    def __init__(self, reply: ReplyContext) -> None:
        super().__init__(reply)
        self._functions = functions(reply.tools)
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
        marker: str | None = ""
        if not self.begins_with_block:
            marker = yield from self._text_until_marker()
        while marker is not None:
            yield from self._block(marker)
            marker = yield from self._text_until_marker()
        space = self._trailing.take()
        if space and not self._only_space_since_call:
            yield TextDelta(space)

    def _block(self, marker: str) -> Steps[None]:
        """Parses what follows an opening marker."""
        raise NotImplementedError

    def _text_until_marker(self) -> Steps[str | None]:
        """Passes all text on up to an opening marker, which is taken, or up to the end."""
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
        """Passes held text on, because it is not a call."""
        return self._possible_call(self._reader.release())

    def _possible_call(self, held: str) -> list[Part]:
        """Passes text on, unless the reply was cut off before it could become a call."""
        if self._is_cut_here and self._may_be_call(held):
            self.is_call_cut = True
            self._reader.rest()
            return []
        return self._text(held)

    @property
    def _is_cut_here(self) -> bool:
        return self._cut and self._reader.is_at_end

    def _may_be_call(self, held: str) -> bool:
        """Bare punctuation counts as text, except directly after a call."""
        return _has_letter(held) or (self._only_space_since_call and bool(held.strip()))

    def _without_partial_marker(self, text: str, markers: MarkerFinder) -> str:
        """The text without a marker at its end that was cut off."""
        if not self._is_cut_here:
            return text
        end = markers.certain(text, 0)
        if end < len(text) and (self._only_space_since_call or _has_letter(text[end:])):
            self.is_call_cut = True
            return text[:end]
        return text

    def _start_call(self, name: str) -> ToolCallStart:
        """Begins a call, to which the held text belongs."""
        self._reader.drop()
        self._trailing.take()
        self._only_space_since_call = True
        self._calls += 1
        return ToolCallStart(self._calls - 1, name)

    def _arguments(self, text: str) -> ArgumentsDelta:
        return ArgumentsDelta(self._calls - 1, text)

    def _end_call(self) -> None:
        self.ended_calls = self._calls

    def _whole_call(self, name: str, arguments: str) -> list[Part]:
        """A call whose text has arrived completely."""
        parts: list[Part] = [self._start_call(name), self._arguments(arguments)]
        self._end_call()
        return parts

    def _raw_arguments(self, ends: MarkerFinder) -> Steps[None]:
        """Passes text on as arguments up to a marker, which stays, without space around it."""
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
