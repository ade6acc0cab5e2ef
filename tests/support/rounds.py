"""Decides how often a random test repeats: few times in `make test`, many in `make stress`."""

from __future__ import annotations

import os

LONG = bool(os.environ.get("LONG_TESTS"))


def rounds(short: int, long: int) -> int:
    return long if LONG else short
