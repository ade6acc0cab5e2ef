"""The time that a turn takes up to its first token, stage by stage."""

from __future__ import annotations

import time
from copy import copy
from typing import Literal

from rekindle.protocol.events import Stages

Stage = Literal["front", "encode", "queue", "plan", "restore", "compute"]


class Stopwatch:
    """Each lap adds the time since the last one to a stage, so stages add up to the whole.

    The clock is the machine's monotonic one, which front and runtime share.
    """

    def __init__(self, received_s: float | None = None) -> None:
        self.stages = Stages()
        self._is_running = True
        self._last_s = time.monotonic() if received_s is None else received_s

    def lap(self, stage: Stage) -> None:
        """Nothing counts after the first token, which ends the stage "compute"."""
        if not self._is_running:
            return
        self._is_running = stage != "compute"
        now_s = time.monotonic()
        setattr(self.stages, stage, getattr(self.stages, stage) + now_s - self._last_s)
        self._last_s = now_s

    def copy(self) -> Stopwatch:
        """One that goes on from here by itself, for a turn of its own."""
        other = copy(self)
        other.stages = copy(self.stages)
        return other
