"""Tokens back into text, as they are sampled."""

from __future__ import annotations

import codecs
from collections.abc import Container, Sequence

from rekindle.chat.encode import Tokenizer
from rekindle.chat.stop import StopMatcher


class TextStream:
    """One reply's text: whole characters only, and nothing from a stop string on."""

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), shown: Container[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._shown = shown
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._matcher = StopMatcher(stop)

    @property
    def stopped(self) -> bool:
        return self._matcher.stopped

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text."""
        return self._matcher.matched if self.stopped else None

    def push(self, token: int) -> str:
        """The text that became certain with this token; control tokens have none, but those
        that are to be shown."""
        piece = self._tokenizer.piece(token, special=token in self._shown)
        return self._matcher.push(self._decoder.decode(piece))

    def finish(self) -> str:
        """The rest of the text; a character cut short becomes U+FFFD."""
        return self._matcher.push(self._decoder.decode(b"", final=True)) + self._matcher.finish()
