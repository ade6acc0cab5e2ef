"""Measures the memory and the CPU time of the processes that run models."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    resident_bytes: int
    cpu_s: float  # since the process started


NOTHING = ProcessUsage(0, 0.0)


def usage_of(pid: int, root: Path = Path("/")) -> ProcessUsage:
    """Return what a process uses, or zeros if it has ended or its system does not say."""
    with suppress(OSError, ValueError, IndexError):
        # The name of the program comes in parentheses and may contain spaces.
        fields = (root / f"proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])  # user and system time
        resident = int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
        return ProcessUsage(resident, ticks / os.sysconf("SC_CLK_TCK"))
    return NOTHING if (root / "proc/self").exists() else _from_ps(pid)


def _from_ps(pid: int) -> ProcessUsage:
    """Ask `ps`, where there is no /proc (macOS)."""
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        command = ["ps", "-o", "rss=,time=", "-p", str(pid)]
        found = subprocess.run(command, capture_output=True, text=True, timeout=2, check=True)
        resident, time = found.stdout.split()
        return ProcessUsage(int(resident) * 1024, _seconds(time))
    return NOTHING


def _seconds(time: str) -> float:
    """Parse [[DD-]HH:]MM:SS[.ff]."""
    days, _, clock = time.rpartition("-")
    seconds = 0.0
    for part in clock.split(":"):
        seconds = seconds * 60 + float(part)
    return seconds + 86_400 * int(days or 0)
