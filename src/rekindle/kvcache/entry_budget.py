"""The memory that entries may take together, and which give way when it is full."""

from __future__ import annotations

from collections.abc import Callable

from rekindle.kvcache.entry import Entry
from rekindle.kvcache.entry_index import EntryIndex


class EntryBudget:
    """Tokens, text, replies and documents; state is the tiers' (`tiers/budget.py`)."""

    def __init__(self, index: EntryIndex, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._index = index

    def could_fit(self, cost_bytes: int) -> bool:
        """Whether so much would fit if nothing else were here."""
        return cost_bytes <= self.limit_bytes

    @property
    def has_room(self) -> bool:
        """Whether something else could make room for one more."""
        pinned = sum(entry.cost_bytes for entry in self._index.of(None) if entry.pinned)
        return pinned < self.limit_bytes

    def enforce(self, forget: Callable[[Entry], None]) -> None:
        """Have entries forgotten until the rest is within bounds. The tenant that has most gives
        way: its oldest that nobody named, then its oldest."""
        index, limit_bytes = self._index, self.limit_bytes
        if index.used_bytes <= limit_bytes:
            return
        share = limit_bytes // len(index.held_bytes)
        for namespace, _ in index.held_bytes.most_common():
            unpinned = [entry for entry in index.of(namespace) if not entry.pinned]
            unpinned.sort(key=lambda entry: not entry.is_free)  # stable: the oldest stay first
            for entry in unpinned:
                if index.used_bytes <= limit_bytes or index.held_bytes[namespace] <= share:
                    break
                forget(entry)
