"""Measures how deeply a JSON value is nested, without recursion."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def levels(value: Any) -> Iterator[list[Any]]:
    """Yield the values of each nesting level, starting with the value itself."""
    level = [value]
    while level:
        yield level
        level = [inner for outer in level for inner in _children(outer)]


def depth_exceeds(value: Any, limit: int) -> bool:
    """Whether a value has more than `limit` levels. A string or a number has one level."""
    return any(depth > limit for depth, _ in enumerate(levels(value), start=1))


def _children(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple) else []
