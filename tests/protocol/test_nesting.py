"""The limit on how deep JSON is nested."""

from __future__ import annotations

from typing import Any

import pytest

from rekindle.protocol.nesting import depth_exceeds


@pytest.mark.parametrize(
    ("value", "levels"),
    [(1, 1), ("text", 1), (None, 1), ([], 1), ({}, 1), ([1], 2), ({"a": [1, {"b": []}]}, 4)],
)
def test_levels_are_counted_down_to_the_innermost_value(value: Any, levels: int) -> None:
    assert not depth_exceeds(value, levels)
    assert depth_exceeds(value, levels - 1)


def test_no_depth_exhausts_the_stack() -> None:
    value: Any = 0
    for _ in range(1_000_000):
        value = [value]
    assert depth_exceeds(value, 64)
    while value:  # freed level by level, or the interpreter's own stack would be exhausted
        value = value[0]
