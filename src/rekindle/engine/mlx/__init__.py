"""Runs models in MLX's format. Imported when such a model is loaded.

Importing mlx_lm lowers the limits on open files to 2,048 and 4,096, and the second one cannot be
raised again. A server with many connections or block files would fail. So mlx_lm is imported here
first, without letting it change the limits.
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
    import mlx_lm  # noqa: F401  # first import, while it cannot change the limits
