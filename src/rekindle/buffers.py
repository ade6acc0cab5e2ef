"""Memory that the state of blocks lies in."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Allocate = Callable[[int], memoryview]  # so many bytes, whatever is in them


def plain_memory(size_bytes: int) -> memoryview:
    """Not a bytearray: filling that with zeros first takes as long as using it."""
    return np.empty(size_bytes, np.uint8).data
