"""How much work something is, as a count that no slow machine changes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType


def calls_made(work: Callable[[], object]) -> int:
    """The calls of functions, in Python and in C, that the work makes."""
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
