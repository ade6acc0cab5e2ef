"""Finds out who used the processor during a measurement. It works only on Linux."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Reading:
    """CPU seconds so far, and the time of the reading."""

    at_s: float
    machine_s: float
    own_s: float
    active_s: float
    idle_s: float


@dataclass(frozen=True, slots=True)
class Load:
    """Shares of one core during one round."""

    scenario: str
    active: str  # by the measured server
    idle_cpu: float  # by the other server, which should be idle
    foreign_cpu: float  # by everything except the two servers and the bench


def read(active_id: int, idle_id: int) -> Reading | None:
    try:
        return Reading(
            at_s=time.monotonic(),
            machine_s=_machine_ticks() / _TICKS_A_SECOND,
            own_s=time.process_time(),
            active_s=_family_ticks(active_id) / _TICKS_A_SECOND,
            idle_s=_family_ticks(idle_id) / _TICKS_A_SECOND,
        )
    except OSError:
        return None


def load_between(before: Reading, after: Reading, scenario: str, active: str) -> Load:
    span_s = after.at_s - before.at_s
    idle_s = after.idle_s - before.idle_s
    known_s = after.own_s - before.own_s + after.active_s - before.active_s + idle_s
    foreign_s = max(0.0, after.machine_s - before.machine_s - known_s)
    return Load(scenario, active, idle_s / span_s, foreign_s / span_s)


_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


def _machine_ticks() -> int:
    user, nice, system, _idle, _wait, *stolen = _total_line()
    return user + nice + system + sum(stolen[:3])  # interrupts and steal time


def _total_line() -> list[int]:
    return [int(ticks) for ticks in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]


def _family_ticks(process_id: int) -> int:
    return sum(_ticks(member) for member in _family(process_id))


def _family(process_id: int) -> Iterator[int]:
    yield process_id
    for children in Path(f"/proc/{process_id}/task").glob("*/children"):
        for child in children.read_text().split():
            yield from _family(int(child))


def _ticks(process_id: int) -> int:
    after_name = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return int(after_name[11]) + int(after_name[12])  # user time and system time
