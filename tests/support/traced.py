"""Records the source lines that run, to compare the work of two requests without measuring time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import rekindle
from rekindle.errors import ServerError

SOURCE = str(Path(rekindle.__file__).parent)

Line = tuple[str, int]


def lines_of(work: Callable[[], Any]) -> tuple[list[Line], Any]:
    """Return the source lines that the work runs, and its result or its error."""
    lines: list[Line] = []

    def trace(frame: FrameType, event: str, _arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(SOURCE):
            return None
        if event == "line":
            lines.append((frame.f_code.co_filename, frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        result = work()
    except ServerError as error:
        result = error.body()
    finally:
        sys.settrace(before)
    return lines, result
