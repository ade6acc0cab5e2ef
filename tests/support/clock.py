"""Provides a clock that a test controls."""

from __future__ import annotations

from rekindle.kvcache.entries.entry import Clock


class FakeClock(Clock):
    """Both clocks. Only the test moves them."""

    def __init__(self) -> None:
        self.steady = 1000.0
        self.wall = 1_800_000_000.0

    def steady_s(self) -> float:
        return self.steady

    def wall_s(self) -> float:
        return self.wall

    def pass_by(self, seconds: float) -> None:
        self.steady += seconds
        self.wall += seconds
