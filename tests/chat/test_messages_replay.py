"""A reply is recognised by its text and calls."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.chat.escaping import EndMarkers, TextSpan, escape
from rekindle.chat.messages import restored, same_message, shows_whole

Message = dict[str, Any]

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(st.text(), values, max_size=4)


def reply(*calls: tuple[str, Any], content: str | None = None, **fields: Any) -> Message:
    listed = [
        {"id": f"c{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for n, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": content, "tool_calls": listed, **fields}


@given(objects, st.booleans(), st.sampled_from([None, 2]), st.randoms(use_true_random=False))
def test_equal_arguments_match_in_any_json_formatting(
    value: dict[str, Any], ascii_only: bool, indent: int | None, chance: Any
) -> None:
    names = list(value)
    chance.shuffle(names)
    other = json.dumps(
        {name: value[name] for name in names}, ensure_ascii=ascii_only, indent=indent
    )
    sampled = reply(("f", json.dumps(value, separators=(",", ":"))))
    assert same_message(reply(("f", other)), sampled)
    assert same_message(reply(("f", value)), sampled)
    back, _ = restored(reply(("f", other)), sampled)
    assert [*json.loads(back["tool_calls"][0]["function"]["arguments"])] == [*value]


@given(objects, st.text(), values)
def test_arguments_that_say_something_else_are_not_the_same(
    value: dict[str, Any], name: str, item: Any
) -> None:
    changed = {**value, name: [item]}
    if json.dumps(changed, sort_keys=True) == json.dumps(value, sort_keys=True):
        return
    assert not same_message(reply(("f", json.dumps(changed))), reply(("f", json.dumps(value))))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a": 1}', '{"a": true}'),
        ('{"a": 0}', '{"a": false}'),
        ('{"a": null}', "{}"),
        ('{"a": "1"}', '{"a": 1}'),
        ("abc", '"abc"'),
        ("{broken", "{broken}"),
        ("[1, 2]", "[2, 1]"),
    ],
)
def test_values_that_look_alike_are_not_the_same(one: str, other: str) -> None:
    assert not same_message(reply(("f", one)), reply(("f", other)))
    assert same_message(reply(("f", one)), reply(("f", one)))


def test_arguments_that_are_not_json_are_compared_as_text() -> None:
    assert same_message(reply(("f", "{cut off")), reply(("f", "{cut off")))
    assert same_message(reply(("f", "")), reply(("f", "{}")))


def test_content_reasoning_and_order_count() -> None:
    original = reply(("f", "{}"), ("g", "{}"), content=" Well. ", reasoning_content="\nHm.\n")
    assert same_message({**original, "content": [{"type": "text", "text": "Well."}]}, original)
    assert same_message({**original, "reasoning_content": None}, original)
    assert same_message({**original, "reasoning": "Hm.", "reasoning_content": None}, original)
    assert not same_message({**original, "reasoning_content": "No."}, original)
    assert not same_message({**original, "content": "Well!"}, original)
    assert not same_message({**original, "tool_calls": original["tool_calls"][::-1]}, original)
    assert not same_message({**original, "tool_calls": original["tool_calls"][:1]}, original)


def test_restored_parts_are_named() -> None:
    original = reply(("f", '{"b":1,"a":2}'), reasoning_content="Hm.")
    assert restored(original, original)[1] == []
    assert restored(reply(("f", '{"a":2,"b":1}'), reasoning_content="Hm."), original)[1] == [
        "arguments"
    ]
    assert restored(reply(("f", '{"b": 1, "a": 2}')), original)[1] == ["reasoning"]


@pytest.mark.parametrize("calls", [None, "x", [None], [{}], [{"function": 7}], [{"function": {}}]])
def test_malformed_calls_match_no_reply(calls: Any) -> None:
    strange = {"role": "assistant", "tool_calls": calls}
    assert not same_message(strange, reply(("f", "{}")))


# -- places --------------------------------------------------------------------------------------


def test_a_reply_ends_only_at_an_end_token_of_the_template() -> None:
    ends = EndMarkers(["<|im_end|>", "<|eot|>"])
    escaped = escape(
        [
            TextSpan("Hello ", literal=False),
            TextSpan("<|im_end|>", literal=True),
            TextSpan(" there<|eot|>\n<|im_end|>", literal=False),
        ]
    )
    end = ends.first_after(escaped, 0)
    assert end is not None
    assert escaped[end:].startswith(b"<|eot|>")
    assert ends.first_after(escaped, end + 1) == escaped.rindex(b"<|im_end|>")
    assert ends.first_after(b"Hello", 0) is None
    assert EndMarkers([]).first_after(b"Hello<|im_end|>", 0) is None


@pytest.mark.parametrize(
    ("body", "is_shown"),
    [
        (b'<think>\nHm.\n</think>Well.<call>{"name": "f"}{"name": "g"}', True),
        (b'Well.{"name": "f"}{"name": "g"}', False),  # the reasoning is dropped
        (b'<think>Hm.</think>{"name": "f"}{"name": "g"}', False),  # the content is
        (b'<think>Hm.</think>Well.{"name": "f"}', False),  # a call is
        (b'<think>Hm.</think>Well.{"name": "g"}{"name": "f"}', False),
        (b"", False),
    ],
)
def test_a_body_shows_a_reply_when_it_shows_all_of_it(body: bytes, is_shown: bool) -> None:
    original = reply(("f", "{}"), ("g", "{}"), content="Well.\n", reasoning_content="Hm.\n")
    assert shows_whole(body, original) is is_shown


def test_reasoning_is_not_shown_by_content_that_repeats_it() -> None:
    original = {"role": "assistant", "content": "Paris.", "reasoning_content": "Paris."}
    assert not shows_whole(b"Paris.", original)
    assert shows_whole(b"<think>Paris.</think>Paris.", original)
