from __future__ import annotations

from typing import Any

import pytest

from rekindle.protocol.requests import depth_exceeds, levels


def nested(depth: int) -> Any:
    """A value with this many levels, alternating lists and objects."""
    value: Any = 1
    for level in range(depth - 1):
        value = [value] if level % 2 else {"a": value}
    return value


@pytest.mark.parametrize("depth", [1, 2, 7, 50])
def test_a_value_exceeds_every_limit_below_its_depth(depth: int) -> None:
    assert not depth_exceeds(nested(depth), depth)
    assert depth_exceeds(nested(depth), depth - 1)


def test_an_empty_object_has_one_level() -> None:
    assert not depth_exceeds({}, 1)
    assert depth_exceeds({"a": {}}, 1)


def test_a_value_too_deep_for_recursion_is_measured() -> None:
    assert depth_exceeds(nested(100_000), 100)


def test_each_level_holds_all_values_of_its_depth() -> None:
    assert list(levels({"a": [1, 2], "b": 3})) == [[{"a": [1, 2], "b": 3}], [[1, 2], 3], [1, 2]]
