"""Runs work that belongs to no turn on the engine's thread, in pieces between two steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator
from typing import TypeVar

PIECE_ENTRIES = 256  # number of cache entries that one piece of work looks at

T = TypeVar("T")
Pieces = Generator[None, None, T]  # work that yields after each piece, and its result


class Background:
    """Between two steps it works for `budget_s` and the rest of one piece at most."""

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, budget_s: float = 0.002
    ) -> None:
        """An engine step takes at least ten times as long as the default budget."""
        self._clock = clock
        self._budget_s = budget_s
        self._works: deque[Pieces[None]] = deque()

    def add(self, work: Pieces[None]) -> None:
        self._works.append(work)

    @property
    def has_work(self) -> bool:
        return bool(self._works)

    def run(self) -> bool:
        """Do one piece of each work in turn until the budget is spent. Returns `has_work`."""
        if not self._works:
            return False
        until = self._clock() + self._budget_s
        while self._works:
            work = self._works.popleft()
            try:
                next(work)
            except StopIteration:
                pass
            else:
                self._works.append(work)
            if self._clock() >= until:
                break
        return self.has_work
