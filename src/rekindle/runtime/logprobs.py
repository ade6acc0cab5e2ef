"""Log probabilities of sampled tokens, until it is known which of them were said."""

from __future__ import annotations

from itertools import accumulate

from rekindle.protocol.events import TokenLogprob


class LogprobBuffer:
    """They wait: a token may turn out to be thought, part of a call, or a marker."""

    def __init__(self) -> None:
        self._waiting: list[TokenLogprob] = []
        self._after_marker = 0  # of those that wait, the first after a marker

    def add(self, log: TokenLogprob, *, marker: bool) -> None:
        self._waiting.append(log)
        if marker:
            self._after_marker = len(self._waiting)

    def drop(self) -> None:
        """None of them was said."""
        self._take(len(self._waiting))

    def all(self) -> list[TokenLogprob]:
        return self._take(len(self._waiting))

    def of(self, text: str) -> list[TokenLogprob]:
        """Those that wrote this text; what comes before it was not said, what comes after waits."""
        first = self._first(text)
        pieces = [log.piece for log in self._waiting[first:]]
        said = text.encode(errors="replace")
        at = b"".join(pieces).find(said)
        if at < 0:  # broken bytes were replaced
            return self.all()[first:]
        starts = list(accumulate(map(len, pieces), initial=0))
        before = sum(end <= at for end in starts[1:])
        reached = sum(start < at + len(said) for start in starts[:-1])
        return self._take(first + reached)[first + before :]

    def _first(self, text: str) -> int:
        """A marker that was said after all is as good as any other text."""
        at = self._after_marker
        is_said = at > 0 and self._waiting[at - 1].piece in text.encode(errors="replace")
        return 0 if is_said else at

    def _take(self, count: int) -> list[TokenLogprob]:
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        self._after_marker = max(0, self._after_marker - count)
        return taken
