"""The tools of a preset obey the rules for the tools of a request."""

from __future__ import annotations

from typing import Any

import pytest

from rekindle.api.base.models import described_tools
from rekindle.config import Preset
from rekindle.errors import ConfigError

FUNCTION = {"name": "f", "parameters": {}}


def preset(*tools: Any) -> Preset:
    return Preset.model_validate({"system_prompt": "x", "tools": list(tools)})


def test_a_tool_may_be_given_by_its_name_or_whole() -> None:
    whole = {"type": "function", "function": {**FUNCTION, "description": None}}
    for tool in ("f", whole):
        assert described_tools("a", preset(tool)) == [{"type": "function", "function": FUNCTION}]


def test_a_preset_without_tools_has_none() -> None:
    assert described_tools("a", preset()) is None


def test_a_tool_that_contains_itself_is_refused() -> None:
    """An alias in YAML can make one."""
    knot: dict[str, Any] = {}
    knot["again"] = knot
    tool = {"type": "function", "function": {"name": "f", "parameters": knot}}
    with pytest.raises(ConfigError, match="nested"):
        described_tools("a", Preset.model_construct(system_prompt="x", tools=[tool]))


@pytest.mark.parametrize(
    ("tools", "expected"),
    [
        (["two words"], r"`projects`, `a\.tools\.0\.function\.name`: takes a name"),
        (["f", "f"], "more than one function called 'f'"),
        ([{"type": "function"}], r"`a\.tools\.0\.function`"),
        ([f"f{number}" for number in range(129)], "at most 128"),
    ],
)
def test_a_wrong_tool_is_refused_with_its_place(tools: list[Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        described_tools("a", preset(*tools))
