"""A small but real engine in NumPy.

The runtime finds it like any external engine, by
`REKINDLE_ENGINE_MODULE=tests.support.numpy_engine`.
"""

from __future__ import annotations

from pathlib import Path

from rekindle.engine.registry import EngineKind

SUFFIX = ".tinynp"


def _is_ours(path: Path) -> bool:
    return path.name.endswith(SUFFIX)


ENGINE = EngineKind("numpy", "tinynp", _is_ours, "tests.support.numpy_engine.engine:NumpyEngine")
