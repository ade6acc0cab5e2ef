"""Provides a cache with a byte budget that evicts the least recently used value."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class ByteLru(Generic[K, V]):
    """Not thread-safe. A value that is larger than the whole budget is not stored."""

    def __init__(self, limit_bytes: int, size_of: Callable[[K, V], int]) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._size_of = size_of
        self._values: OrderedDict[K, V] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        """Does not count as a use."""
        return key in self._values

    def __iter__(self) -> Iterator[K]:
        """Least recently used first."""
        return iter(self._values)

    def get(self, key: K) -> V | None:
        """The value, which becomes the most recently used one."""
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
        return value

    def put(self, key: K, value: V) -> list[K]:
        """Store a value. Returns the keys that were evicted, which include `key` if it is too
        large."""
        self.remove(key)
        size_bytes = self._size_of(key, value)
        if size_bytes > self.limit_bytes:
            return [key]
        self._values[key] = value
        self.used_bytes += size_bytes
        evicted: list[K] = []
        while self.used_bytes > self.limit_bytes:
            evicted.append(next(iter(self._values)))
            self.remove(evicted[-1])
        return evicted

    def remove(self, key: K) -> None:
        value = self._values.pop(key, None)
        if value is not None:
            self.used_bytes -= self._size_of(key, value)
