"""Models in MLX's format, computed with MLX; imported when such a model is loaded.

Importing mlx_lm sets the process's limits on open files to 2,048 and 4,096, the second of which
cannot be raised again: a server with many connections or block files would fail. So it is imported
here, before any module of this package can, and leaves the limits as they are.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def _limits_kept() -> Iterator[None]:
    real = resource.setrlimit
    resource.setrlimit = lambda *_limits: None
    try:
        yield
    finally:
        resource.setrlimit = real


with _limits_kept():
    import mlx_lm  # noqa: F401  # for its side effects, while they are harmless
