"""Which remembered text does this one begin with? Sorted texts, and a walk along prefixes."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import Generic, TypeVar

from rekindle.tokens import common_bytes

T = TypeVar("T")


class Texts(Generic[T]):
    """Values by text; of two equal texts the later value stays."""

    def __init__(self) -> None:
        self._order: list[bytes] = []
        self._values: dict[bytes, T] = {}

    def __len__(self) -> int:
        return len(self._order)

    def put(self, text: bytes, value: T) -> None:
        if text not in self._values:
            insort(self._order, text)
        self._values[text] = value

    def drop(self, text: bytes, value: T) -> None:
        """Forget the text, unless it has another value by now."""
        if self._values.get(text) is value:
            del self._values[text]
            self._order.pop(bisect_left(self._order, text))

    def longest(self, text: bytes) -> T | None:
        """The value of the longest stored text that `text` begins with.

        The greatest text not above it either is that prefix, or shows how long one can be at most.
        """
        while at := bisect_right(self._order, text):
            nearest = self._order[at - 1]
            if text.startswith(nearest):
                return self._values[nearest]
            text = text[: common_bytes(nearest, text)]
        return None
