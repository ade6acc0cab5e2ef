"""Rekindle: an OpenAI-compatible server that keeps and reuses the KV cache of conversations."""

from __future__ import annotations

from rekindle.version import __version__

TYPE_CHECKING = False  # type checkers know this name; `typing` itself takes long to import
if TYPE_CHECKING:
    from typing import Any

    from rekindle.front.embedded import Engine, EngineConfig

__all__ = ["Engine", "EngineConfig", "__version__"]


def __getattr__(name: str) -> Any:
    """Import the server only on demand, so that `import rekindle` stays fast."""
    if name in ("Engine", "EngineConfig"):
        from rekindle.front import embedded

        return getattr(embedded, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
