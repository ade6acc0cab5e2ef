"""Where the time to a turn's first token goes."""

from __future__ import annotations

import time
from typing import Literal

from rekindle.protocol.events import Stages

Stage = Literal["front", "encode", "queue", "plan", "restore", "compute"]


class Stopwatch:
    """Each lap adds the time since the last one to a stage, so stages add up to the whole.

    The clock is the machine's monotonic one, which front and runtime share.
    """

    def __init__(self, received_s: float | None = None) -> None:
        self.stages = Stages()
        self._last_s = time.monotonic() if received_s is None else received_s

    def lap(self, stage: Stage) -> None:
        now_s = time.monotonic()
        setattr(self.stages, stage, getattr(self.stages, stage) + now_s - self._last_s)
        self._last_s = now_s
