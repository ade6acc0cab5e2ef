"""A set of tools is one prompt, in whatever order it comes."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rekindle.chat.tool_order import differ, ordered


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters or {}}}


@given(st.permutations([tool(name) for name in ("read", "write", "list", "grep")]))
def test_tools_come_by_their_names(tools: list[Any]) -> None:
    assert [each["function"]["name"] for each in ordered(tools)] == [
        *("grep", "list", "read", "write")
    ]


def test_keywords_have_a_fixed_order_at_any_depth() -> None:
    one = {
        "required": ["a"],
        "properties": {"a": {"description": "x", "type": "array", "items": {"b": 1, "type": "n"}}},
        "type": "object",
    }
    other = {
        "type": "object",
        "properties": {"a": {"items": {"type": "n", "b": 1}, "type": "array", "description": "x"}},
        "required": ["a"],
    }
    strict = {"function": {"strict": True, "parameters": one, "name": "f"}, "type": "function"}
    loose = {"type": "function", "function": {"name": "f", "parameters": other, "strict": True}}
    assert json.dumps(ordered([strict])) == json.dumps(ordered([loose]))
    assert differ([strict], ordered([strict]))
    assert not differ(ordered([loose]), ordered(ordered([loose])))


def test_properties_stay_as_their_author_has_them() -> None:
    """A model fills arguments in the order of the schema: a thought first, then the answer."""
    schema = {"type": "object", "properties": {"thought": {}, "answer": {}, "type": {}}}
    [after] = ordered([tool("f", schema)])
    assert list(after["function"]["parameters"]["properties"]) == ["thought", "answer", "type"]


def test_values_are_no_keywords() -> None:
    schema = {"default": {"z": 1, "type": 2}, "enum": ["z", "a"], "const": {"z": 1, "a": 2}}
    [after] = ordered([tool("f", schema)])
    assert json.dumps(after["function"]["parameters"]["default"]) == '{"z": 1, "type": 2}'
    assert after["function"]["parameters"]["enum"] == ["z", "a"]


def test_what_is_no_definition_is_passed_on() -> None:
    strange: list[Any] = ["x", {"type": "web_search"}, {"function": 7}, tool("f")]
    assert sorted(map(json.dumps, ordered(strange))) == sorted(map(json.dumps, strange))
