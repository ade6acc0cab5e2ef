"""Measures memory."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable


def allocated_bytes(work: Callable[[], object]) -> int:
    """Bytes that the work has allocated and not freed."""
    gc.collect()
    tracemalloc.start()
    try:
        work()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def peak_bytes(work: Callable[[], object]) -> int:
    """The most bytes that the work has allocated at the same time."""
    gc.collect()
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
