"""Rekindle: an OpenAI-compatible server that never computes the same prompt twice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rekindle.server.python_api import Engine, EngineConfig

__version__ = "0.1.0"
__all__ = ["Engine", "EngineConfig", "__version__"]


def __getattr__(name: str) -> Any:
    """The engine brings half of the program with it: imported when somebody wants it."""
    if name in ("Engine", "EngineConfig"):
        from rekindle.server import python_api as local

        return getattr(local, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
