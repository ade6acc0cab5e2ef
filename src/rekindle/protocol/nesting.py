"""How deep a JSON value is nested, found without recursion."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def levels(value: Any) -> Iterator[list[Any]]:
    """The values of each level: the value itself, then what is inside it, and so on."""
    level = [value]
    while level:
        yield level
        level = [inner for outer in level for inner in _inside(outer)]


def depth_exceeds(value: Any, limit: int) -> bool:
    """Whether a value has more than `limit` levels; a string or a number has one."""
    return any(depth > limit for depth, _ in enumerate(levels(value), start=1))


def _inside(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple) else []
