"""How far a turn's state has got on its way into cells of another type."""

from __future__ import annotations

from rekindle.engine.base import Sequence


class Crossing:
    """The sequence that holds it, and the one that it is written into again."""

    __slots__ = ("into", "source")

    def __init__(self, source: Sequence) -> None:
        self.source = source
        self.into: Sequence | None = None  # None: there was no room for it yet
