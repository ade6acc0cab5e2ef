"""How often a test with chance in it tries: briefly in `make test`, for long in `make stress`."""

from __future__ import annotations

import os

LONG = bool(os.environ.get("LONG_TESTS"))


def rounds(short: int, long: int) -> int:
    return long if LONG else short
