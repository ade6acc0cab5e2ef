"""Two clocks: one that never jumps, for lifetimes; one on the wall, for people and restarts."""

from __future__ import annotations

import time


class Clock:
    def steady_s(self) -> float:
        """Seconds that only go forward, and mean nothing after a restart."""
        return time.monotonic()

    def wall_s(self) -> float:
        """Seconds since 1970, as far as this machine knows."""
        return time.time()
