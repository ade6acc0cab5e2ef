"""A reply and the moments at which it came."""

from __future__ import annotations

from dataclasses import dataclass, field

from rekindle.bench.stream import BenchFailed, Chunk, Usage


@dataclass(frozen=True, slots=True)
class Reply:
    text: str
    sent_s: float
    first_s: float  # when the first token's text arrived
    last_s: float  # when the last token's text arrived
    usage: Usage

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.sent_s


@dataclass(slots=True)
class Recording:
    """What a stream has brought so far; a chunk without text starts no clock."""

    sent_s: float
    _text: list[str] = field(default_factory=list)
    _first_s: float | None = None
    _last_s: float | None = None
    _usage: Usage | None = None

    def take(self, chunk: Chunk, now_s: float) -> None:
        if chunk.text or chunk.thought:
            self._first_s = now_s if self._first_s is None else self._first_s
            self._last_s = now_s
        self._text.append(chunk.text)
        self._usage = chunk.usage or self._usage

    def finish(self, now_s: float) -> Reply:
        """The whole reply; one without any text is timed at its end."""
        if self._usage is None:
            raise BenchFailed("the stream ended without usage, so its tokens cannot be counted")
        first_s = now_s if self._first_s is None else self._first_s
        last_s = now_s if self._last_s is None else self._last_s
        return Reply("".join(self._text), self.sent_s, first_s, last_s, self._usage)
