"""Turns sampled tokens into text and ends it at a stop string."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Container, Sequence

from rekindle.tokens import Tokenizer


class Detokenizer:
    """Decodes one reply up to a stop string. Control tokens have text only if in `shown`."""

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), shown: Container[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._shown = shown
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_whole = True  # the decoder has no pending bytes of a character
        self._matcher = StopMatcher(stop)

    @property
    def stopped(self) -> bool:
        return self._matcher.stopped

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text."""
        return self._matcher.matched if self.stopped else None

    def push(self, token: int, *, may_stop: bool = True) -> str:
        """The text that this token makes final. Without `may_stop` no stop string ends in it."""
        piece = self._tokenizer.piece(token, special=token in self._shown)
        return self._matcher.push(self._decode(piece), may_stop=may_stop)

    def _decode(self, piece: bytes) -> str:
        if self._is_whole and piece.isascii():  # the common case, and several times faster
            return piece.decode()
        text = self._decoder.decode(piece)
        self._is_whole = not self._decoder.getstate()[0]
        return text

    def finish(self) -> str:
        """The rest of the text. An incomplete character becomes U+FFFD."""
        return self._matcher.push(self._decoder.decode(b"", final=True)) + self._matcher.finish()


class StopMatcher:
    """Passes text on up to the earliest stop string, independent of how the text is split.

    This is an Aho-Corasick automaton. The depth of its state is the length of the longest suffix
    that may still become a stop string. Exactly that suffix is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stopped = False
        self.matched: str | None = None
        self._edges: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._fallback = [0]  # the state of the longest proper suffix
        self._ending: list[str | None] = [None]  # the longest stop string that ends in the state
        for stop in stops:
            self._add(stop)
        self._link()
        self._state = 0
        self._held = ""
        self._cut: int | None = None  # the start of the best match so far, in the held text

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """The text that can no longer be part of a stop string.

        Without `may_stop`, a stop string that ends in this text is plain text. A stop string that
        begins in this text may still end in later text.
        """
        if self.stopped:
            return ""
        if not self._state and self._edges[0].keys().isdisjoint(text):
            return text  # the common case: nothing is held, and no stop string begins here
        whole = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            self._state = self._after(character)
            if may_stop:
                self._note(end)
            # A match inside a longer stop string waits while the longer one may still complete.
            if self._cut is not None and self._cut <= end - self._depth[self._state]:
                return self._stop(whole[: self._cut])
        certain = len(whole) - self._depth[self._state]
        self._held = whole[certain:]
        if self._cut is not None:
            self._cut -= certain
        return whole[:certain]

    def finish(self) -> str:
        """The held text, at the end of the reply."""
        if self._cut is not None and not self.stopped:
            return self._stop(self._held[: self._cut])
        held, self._held = self._held, ""
        return held

    def _stop(self, text: str) -> str:
        self.stopped, self._held = True, ""
        return text

    def _note(self, end: int) -> None:
        stop = self._ending[self._state]
        if stop is not None and (self._cut is None or end - len(stop) < self._cut):
            self._cut, self.matched = end - len(stop), stop

    def _after(self, character: str) -> int:
        state = self._state
        while state and character not in self._edges[state]:
            state = self._fallback[state]
        return self._edges[state].get(character, 0)

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            if character not in self._edges[state]:
                self._edges[state][character] = len(self._edges)
                self._edges.append({})
                self._depth.append(self._depth[state] + 1)
                self._fallback.append(0)
                self._ending.append(None)
            state = self._edges[state][character]
        if state:  # ignores an empty stop string
            self._ending[state] = stop

    def _link(self) -> None:
        queue = deque(self._edges[0].values())
        while queue:
            parent = queue.popleft()
            for character, state in self._edges[parent].items():
                self._state = self._fallback[parent]
                self._fallback[state] = self._after(character)
                self._ending[state] = self._ending[state] or self._ending[self._fallback[state]]
                queue.append(state)
