"""Exports of idle sequences that somebody waits for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container
from dataclasses import dataclass

from rekindle.runtime.idle_exports import IdleExports
from rekindle.runtime.offload import IdleSequence


@dataclass(frozen=True, slots=True)
class _Asked:
    idle: IdleSequence
    tokens: int  # so many of it at least
    then: Callable[[], None]


class AskedExports:
    """Made in the order in which they were asked for, as the allowance of each step goes."""

    def __init__(self, exports: IdleExports) -> None:
        self._exports = exports
        self._asked: deque[_Asked] = deque()

    def ask(self, idle: IdleSequence, tokens: int, then: Callable[[], None]) -> None:
        self._asked.append(_Asked(idle, tokens, then))

    @property
    def first(self) -> IdleSequence:
        """The one that is to be gone on with."""
        return self._asked[0].idle

    def go_on(self, here: Container[IdleSequence]) -> bool:
        """Call back for those that are done, or whose sequence is not here any more; False: the
        next step goes on."""
        while self._asked:
            asked = self._asked[0]
            if asked.idle in here and not self._exports.export(asked.idle, asked.tokens):
                return False
            self._asked.popleft()
            asked.then()
        return True
