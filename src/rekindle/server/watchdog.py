"""Whether a runtime makes progress: by what it says of itself, and by its silence."""

from __future__ import annotations

import time
from collections.abc import Callable


class Watchdog:
    """A heartbeat says how long the engine's thread has been at its current work. What is stuck
    while it holds the interpreter's lock sends none; that adds up to the same."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._heard_s = clock()
        self._working_s = 0.0  # when it was heard
        self.fired = 0

    def hear(self, working_s: float = 0.0) -> None:
        """A sign of life, and how long the runtime has been at its current work."""
        self._heard_s, self._working_s = self._clock(), working_s

    @property
    def stalled_s(self) -> float:
        """How long there may have been no progress."""
        return self._clock() - self._heard_s + self._working_s

    def fires(self) -> bool:
        """Whether there was none for too long; counts it if so."""
        is_stuck = self.stalled_s > self._limit_s
        self.fired += is_stuck
        return is_stuck
