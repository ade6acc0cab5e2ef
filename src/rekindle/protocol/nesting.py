"""A limit on how deep JSON is nested, checked before anything walks it by recursion."""

from __future__ import annotations

from typing import Any


def depth_exceeds(value: Any, limit: int) -> bool:
    """Whether `value` has more than `limit` levels; a number, a string or an empty list has one.

    Level by level and never by recursion: JSON of a client may be nested a million deep.
    """
    level = [value]
    for _ in range(limit):
        level = [inner for outer in level for inner in children(outer)]
        if not level:
            return False
    return True


def children(value: Any) -> list[Any]:
    """The values directly inside a JSON value."""
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
