"""Work for the engine's thread that is nobody's turn: done a slice at a time, between two steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator
from typing import TypeVar

SLICE_S = 0.002  # of work between two steps, which take ten times as long or more
PIECE_ENTRIES = 256  # of the cache, that are looked at in one piece

T = TypeVar("T")
Pieces = Generator[None, None, T]  # work that yields between two pieces of it, and its result


class Background:
    """Whatever is asked of it, a turn waits for a slice of it and the rest of one piece at most."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._works: deque[Pieces[None]] = deque()

    def add(self, work: Pieces[None]) -> None:
        self._works.append(work)

    @property
    def has_work(self) -> bool:
        return bool(self._works)

    def run(self) -> bool:
        """Do a piece of each work in turn, until the slice is over; whether anything is left."""
        if not self._works:
            return False
        until = self._clock() + SLICE_S
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
        return bool(self._works)
