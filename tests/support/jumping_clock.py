"""Gives processes a wall clock that a test can set while they run.

A small library of ours replaces the C library's clock functions, so nothing has to be installed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("jumping_clock.c")
FLAGS = ("-std=gnu11", "-O2", "-shared", "-fPIC")


class JumpingClock:
    """`environment` is for the processes that have this clock."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc")
        if compiler is None or sys.platform != "linux":
            pytest.skip("a clock that jumps needs Linux and a C compiler (cc)")
        library = folder / "jumping_clock.so"
        subprocess.run([compiler, *FLAGS, "-o", library, SOURCE, "-ldl"], check=True)
        self._shift = folder / "shift"
        self.environment: Mapping[str, str] = {
            "LD_PRELOAD": str(library),
            "JUMPING_CLOCK": str(self._shift),
        }
        self.jump_to(0)

    def jump_to(self, shift_s: int) -> None:
        """Set the difference to the real time."""
        with self._shift.open("r+b" if self._shift.exists() else "wb") as file:
            file.write(shift_s.to_bytes(8, sys.byteorder, signed=True))
