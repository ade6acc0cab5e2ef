"""Entries in the order of their last use, to be read page by page."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from rekindle.kvcache.entry import Entry

LEAST_STALE = 64  # places worth removing


class UseOrder:
    """A use gives an entry the next place; the one it had is stale, and removed with many others.

    Places only grow, so whoever has read down to one can go on below it later, whatever was used,
    added or removed in the meantime.
    """

    def __init__(self) -> None:
        self._places: list[tuple[int, Entry]] = []  # ascending
        self._stale = 0

    def __len__(self) -> int:
        return len(self._places) - self._stale

    def __iter__(self) -> Iterator[Entry]:
        """The oldest use first."""
        return (entry for place, entry in self._places if entry.place == place)

    def append(self, entry: Entry) -> None:
        """The entry has a new place, above all others."""
        self._places.append((entry.place, entry))

    def leave(self) -> None:
        """An entry is about to leave its place."""
        self._stale += 1
        if self._stale > LEAST_STALE + len(self):
            self._places = [(place, entry) for place, entry in self._places if entry.place == place]
            self._stale = 1  # the one that is about to leave

    def newest(self, before: int | None = None) -> Iterator[Entry]:
        """The newest use first, from below a place on; nothing may change meanwhile."""
        at = len(self._places)
        if before is not None:
            at = bisect_left(self._places, before, key=lambda each: each[0])
        for index in range(at - 1, -1, -1):
            place, entry = self._places[index]
            if entry.place == place:
                yield entry
