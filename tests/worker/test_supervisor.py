"""The watchdog detects a process that makes no progress."""

from __future__ import annotations

import pytest

from rekindle.worker.supervisor import Watchdog


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize(
    ("working_s", "silent_s", "fires"),
    [(0, 59, False), (59, 0, False), (61, 0, True), (0, 61, True), (40, 30, True)],
    ids=["heard", "a long step", "a stuck step", "silence", "a long step, then silence"],
)
def test_the_watchdog_fires_after_too_long_without_progress(
    working_s: float, silent_s: float, fires: bool
) -> None:
    clock = Clock()
    watchdog = Watchdog(60, clock)
    clock.now_s += 1000
    watchdog.heartbeat(working_s)
    clock.now_s += silent_s
    assert watchdog.fires() == fires
    assert watchdog.fired == fires


def test_progress_resets_the_watchdog() -> None:
    clock = Clock()
    watchdog = Watchdog(60, clock)
    for _ in range(10):
        clock.now_s += 50
        assert not watchdog.fires()
        watchdog.heartbeat(working_s=1.0)
    clock.now_s += 60
    assert watchdog.fires()
