"""Measures work as a number of calls, which does not depend on the speed of a machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType


def calls_made(work: Callable[[], object]) -> int:
    """The number of Python and C function calls of some work."""
    count = 0

    def on_call(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(on_call)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count
