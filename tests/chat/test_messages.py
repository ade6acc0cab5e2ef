from __future__ import annotations

from typing import Any

import pytest

from rekindle.chat.messages import (
    call_values,
    canonical,
    content_text,
    reasoning_text,
    with_parsed_arguments,
)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a b", "a b"),
        ([{"type": "text", "text": "a"}, {"type": "image"}, "x", {"text": "b"}], "a|b"),
        ([{"text": 7}], ""),
        (None, ""),
        (7, ""),
    ],
)
def test_content_of_any_form_has_a_text(content: Any, text: str) -> None:
    assert content_text(content, "|") == text


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_found_by_each_of_its_names(field: str) -> None:
    assert reasoning_text({field: " Hm.\n"}) == "Hm."
    assert reasoning_text({field: 7}) == reasoning_text({}) == ""


def test_equal_arguments_have_equal_values() -> None:
    written: list[Any] = ['{"a": 1.0, "b": [2]}', ' {"b":[2.0],"a":1}', {"b": [2], "a": 1.0}]
    calls = [{"function": {"name": "f", "arguments": each}} for each in written]
    assert call_values({"tool_calls": calls}) == [["f", [{"a": 1, "b": [2]}]]] * 3
    [[_, broken]] = call_values({"tool_calls": [{"function": {"arguments": "{cut"}}]})
    assert broken == {"text": "{cut"}


def test_the_canonical_form_ignores_the_order_of_keys_and_is_ascii() -> None:
    assert canonical({"b": "\ud800é", "a": 1}) == canonical({"a": 1, "b": "\ud800é"})
    assert canonical({"b": "é"}) == b'{"b":"\\u00e9"}'


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("hi", "hi"),
        ("", ""),
        (None, ""),
        (7, ""),
        ([], ""),
        ([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "one\ntwo"),
        ([{"type": "image_url"}, {"type": "text", "text": "one"}, "two", {"text": 1}], "one"),
    ],
)
def test_the_text_of_any_content_is_found(content: object, text: str) -> None:
    assert content_text(content) == text


def calling(arguments: str) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


@pytest.mark.parametrize("arguments", ["{not json", '{"a": NaN}', '{"a": 1e999}', "[1]", "7"])
def test_arguments_that_are_not_an_object_stay_a_string(arguments: str) -> None:
    message = with_parsed_arguments(calling(arguments))
    assert message["tool_calls"][0]["function"]["arguments"] == arguments


def test_deeply_nested_arguments_stay_a_string() -> None:
    for depth in (60, 100_000):
        arguments = '{"a":' + "[" * depth + "]" * depth + "}"
        message = with_parsed_arguments(calling(arguments))
        assert message["tool_calls"][0]["function"]["arguments"] == arguments


def test_a_whole_character_in_two_escapes_is_one() -> None:
    message = with_parsed_arguments(calling('{"a": "\\ud83d\\ude00"}'))
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": "😀"}
