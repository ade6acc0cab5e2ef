"""Rekindle: an OpenAI-compatible server that keeps and reuses the KV cache of conversations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rekindle.version import __version__

if TYPE_CHECKING:
    from rekindle.front.embedded import Engine, EngineConfig

__all__ = ["Engine", "EngineConfig", "__version__"]


def __getattr__(name: str) -> Any:
    """Import the server only on demand, so that `import rekindle` stays fast."""
    if name in ("Engine", "EngineConfig"):
        from rekindle.front import embedded

        return getattr(embedded, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
