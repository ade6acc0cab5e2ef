"""Arguments of calls in a history, parsed where they are JSON objects."""

from __future__ import annotations

from typing import Any

import pytest

from rekindle.chat.arguments import parsed


def calling(arguments: str) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


@pytest.mark.parametrize("arguments", ["{not json", '{"a": NaN}', '{"a": 1e999}', "[1]", "7"])
def test_what_is_no_object_stays_the_string_it_was(arguments: str) -> None:
    message = parsed(calling(arguments))
    assert message["tool_calls"][0]["function"]["arguments"] == arguments


def test_what_is_nested_too_deep_stays_a_string() -> None:
    for depth in (60, 100_000):
        arguments = '{"a":' + "[" * depth + "]" * depth + "}"
        message = parsed(calling(arguments))
        assert message["tool_calls"][0]["function"]["arguments"] == arguments


def test_a_whole_character_in_two_escapes_is_one() -> None:
    message = parsed(calling('{"a": "\\ud83d\\ude00"}'))
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": "😀"}
