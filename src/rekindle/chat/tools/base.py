"""What all parsers of replies share: taking text in, speech, and counting calls."""

from __future__ import annotations

from rekindle.chat.tools.reader import Finder, Source, Steps
from rekindle.protocol.events import ArgumentsDelta, Part, TextDelta, ToolCallStart


class Tail:
    """Text whose last whitespace waits for what comes after it."""

    def __init__(self) -> None:
        self._space: list[str] = []

    def add(self, text: str) -> str:
        """The text that is certainly followed by more than whitespace, or is none."""
        body = text.rstrip()
        if not body:
            self._space.append(text)
            return ""
        certain = "".join(self._space) + body
        self._space = [text[len(body) :]]
        return certain

    def rest(self) -> str:
        """The whitespace that waits."""
        space, self._space = "".join(self._space), []
        return space


class Machine:
    """A parser written as one generator over a source.

    Whitespace before a call, and whitespace alone after one, is dropped; all other text that is no
    call is said.
    """

    opens = Finder()  # markers at which something other than speech may begin
    closes: tuple[str, ...] = ()  # markers that end a call; without any call before, they are text

    def __init__(self) -> None:
        self.thinking = False
        self.ended_calls = 0
        self._source = Source()
        self._calls = 0
        self._tail = Tail()
        self._silent = False  # nothing but whitespace since the last call
        self._marks = Finder(*self.opens.markers, *self.closes)
        self._steps = self._run()

    def push(self, text: str) -> list[Part]:
        self._source.feed(text)
        return self._advance()

    def finish(self) -> list[Part]:
        self._source.ended = True
        return self._advance()

    def _advance(self) -> list[Part]:
        parts: list[Part] = []
        for part in self._steps:
            if part is None:
                break
            parts.append(part)
        return parts

    def _run(self) -> Steps[None]:
        """Speech, with a block at each opening marker."""
        while (marker := (yield from self._speak())) is not None:
            yield from self._block(marker)
        yield from self._hush()

    def _block(self, marker: str) -> Steps[None]:
        """What follows an opening marker."""
        raise NotImplementedError

    def _speak(self) -> Steps[str | None]:
        """Say all text up to an opening marker, which is taken, or up to the end."""
        while True:
            text, marker = yield from self._source.until(self._marks)
            yield from self._say(text)
            if marker is None:
                if not text:
                    return None
                continue
            self._source.skip(len(marker))
            if marker in self.opens.markers:
                return marker
            if not self._calls:
                yield from self._say(marker)

    def _say(self, text: str) -> list[Part]:
        certain = self._tail.add(text)
        if not certain:
            return []
        self._silent = False
        return [TextDelta(certain)]

    def _unsay(self) -> list[Part]:
        """What was held for a call is none: say it."""
        return self._say(self._source.release())

    def _hush(self) -> list[Part]:
        """The end of speech."""
        space = self._tail.rest()
        return [TextDelta(space)] if space and not self._silent else []

    def _begin(self, name: str) -> ToolCallStart:
        """A call is certain; what was held for it need not be said any more."""
        self._source.drop()
        self._tail.rest()
        self._silent = True
        self._calls += 1
        return ToolCallStart(self._calls - 1, name)

    def _argue(self, text: str) -> ArgumentsDelta:
        return ArgumentsDelta(self._calls - 1, text)

    def _end(self) -> None:
        self.ended_calls = self._calls

    def _argue_raw(self, ends: Finder) -> Steps[None]:
        """Pass on, as arguments, all text up to a marker, which stays, less the space around it."""
        yield from self._source.space()
        tail, empty = Tail(), True
        while True:
            text, marker = yield from self._source.until(ends)
            if certain := tail.add(text):
                empty = False
                yield self._argue(certain)
            if marker is not None or not text:
                break
        if empty:
            yield self._argue("{}")
        self._end()
