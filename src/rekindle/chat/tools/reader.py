"""Reading a text that arrives in pieces as if all of it were there."""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import Protocol, TypeVar

from rekindle.protocol.events import Part

T = TypeVar("T")

#: A read that pauses, by yielding None, until the text it needs has arrived.
Reading = Generator[None, None, T]
#: A read that also yields the parts it finds.
Steps = Generator[Part | None, None, T]

SPACE = re.compile(r"\s*")


class MarkerFinder:
    """Finds the first of some markers, none of which begins another.

    With `escapes`, a character after a backslash is never part of a marker.
    """

    def __init__(self, *markers: str, escapes: bool = False) -> None:
        self.markers = markers
        self.pattern = "|".join(map(re.escape, markers)) or "(?!)"
        escape = r"\\." if escapes else "(?!)"
        self._whole = re.compile(f"({self.pattern})|{escape}", re.DOTALL)
        starts = [_prefixes(marker[:-1]) for marker in markers if len(marker) > 1]
        starts += [r"\\"] * escapes
        self._part = re.compile(f"(?:{'|'.join(starts) or '(?!)'})\\Z")
        self._reach = max(map(len, markers), default=1)

    def find(self, text: str, at: int) -> tuple[int, str | None]:
        """Where the text up to which no marker occurs ends, and the marker there, if any."""
        for match in self._whole.finditer(text, at):
            if match[1] is not None:
                return match.start(), match[1]
            at = match.end()
        return self.certain(text, at), None

    def certain(self, text: str, at: int) -> int:
        """Where the end of the text begins that more text may turn into a marker."""
        part = self._part.search(text, max(at, len(text) - self._reach))
        return part.start() if part else len(text)


class Scan(Protocol):
    """Finds the end of something in a text, continuing where it last stopped."""

    @property
    def done(self) -> bool: ...

    def read(self, text: str, at: int, *, ended: bool) -> int:
        """How far it certainly reaches."""


class StreamReader:
    """The text that has arrived and was not taken yet, after a read a marker's length at most.

    Every method decides by the text alone, never by where it was cut, so parsers built on them do
    not depend on the cuts either.
    """

    def __init__(self, text: str = "", *, ended: bool = False) -> None:
        self._text = text
        self._at = 0
        self.ended = ended
        self._is_marker_cut = False  # the end came in the middle of a marker that was looked for
        self._held: list[str] | None = None

    def feed(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    @property
    def is_at_end(self) -> bool:
        """Whether everything was taken, but for the beginning of a marker that was looked for."""
        return self.ended and (self._at == len(self._text) or self._is_marker_cut)

    def hold(self, text: str = "") -> None:
        """Record what is taken from now on, after this text that was taken already."""
        self._held = [text]

    def release(self) -> str:
        """All that was taken since `hold`."""
        held, self._held = self._held or [], None
        return "".join(held)

    def drop(self) -> None:
        """Discard what was recorded."""
        self._held = None

    def peek(self) -> Reading[str]:
        """The next character, which is not taken; empty at the end."""
        while self._at == len(self._text):
            if self.ended:
                return ""
            yield
        return self._text[self._at]

    def skip(self, characters: int) -> None:
        """Take text that has arrived."""
        self._take(self._at + characters)

    def run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Take all characters that match the pattern, a repeated character class."""
        taken = ""
        pieces: list[str] = []
        while True:
            match = pattern.match(self._text, self._at)
            if match and match.end() > self._at:
                taken = self._take(match.end())
                pieces.append(taken)
            if self.ended or self._at < len(self._text):
                return taken if len(pieces) < 2 else "".join(pieces)
            yield

    def space(self) -> Reading[str]:
        return self.run(SPACE)

    def starts(self, *markers: str) -> Reading[str | None]:
        """Take the longest of the markers that the text continues with; None if with none."""
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
                if self._text.startswith(marker, self._at):
                    found = max(found, marker, key=len)
                elif marker.startswith(self._text[self._at : self._at + len(marker)]):
                    waits = not self.ended  # it has arrived only in part
                    self._is_marker_cut |= self.ended
            if not waits:
                return found or None
            yield

    def until(self, finder: MarkerFinder) -> Reading[tuple[str, str | None]]:
        """Take some text without a marker; also the marker that follows, which is not taken.

        Without one, either more follows or, when the text is empty too, this is the end.
        """
        while True:
            end, marker = finder.find(self._text, self._at)
            if self.ended and marker is None:
                end = len(self._text)
            if end > self._at or marker is not None or self.ended:
                return self._take(end), marker
            yield

    def through(self, finder: MarkerFinder) -> Reading[tuple[str, str | None]]:
        """Take all text up to and including a marker, or up to the end."""
        pieces = []
        while True:
            text, marker = yield from self.until(finder)
            pieces.append(text)
            if marker is not None:
                self.skip(len(marker))
            if marker is not None or not text:
                return "".join(pieces), marker

    def scan(self, scan: Scan) -> Reading[str]:
        """Take the next piece of what is scanned; empty when there is no more of it."""
        while not scan.done:
            end = scan.read(self._text, self._at, ended=self.ended)
            if end > self._at:
                return self._take(end)
            if self.ended:
                break
            if not scan.done:
                yield
        return ""

    def rest(self) -> str:
        """Take everything that has arrived."""
        return self._take(len(self._text))

    def _take(self, end: int) -> str:
        text = self._text[self._at : end]
        self._at = end
        if self._held is not None:
            self._held.append(text)
        return text


def at_once(reading: Reading[T]) -> T:
    """The result of a read whose text has arrived completely."""
    try:
        next(reading)
    except StopIteration as stop:
        value: T = stop.value
        return value
    raise RuntimeError("the text has not ended")


def _prefixes(text: str) -> str:
    """A pattern that matches every prefix of the text."""
    pattern = ""
    for character in reversed(text):
        pattern = re.escape(character) + (f"(?:{pattern})?" if pattern else "")
    return pattern
