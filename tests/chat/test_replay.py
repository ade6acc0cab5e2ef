"""A reply is recognised by what it says, and by nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.chat.escaping import Span, mark
from rekindle.chat.replay import Ends, Keys, restored, same, shows

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
    told = [
        {"id": f"c{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for n, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": content, "tool_calls": told, **fields}


@given(objects, st.booleans(), st.sampled_from([None, 2]), st.randoms(use_true_random=False))
def test_arguments_are_the_same_however_they_are_written(
    value: dict[str, Any], ascii_only: bool, indent: int | None, chance: Any
) -> None:
    names = list(value)
    chance.shuffle(names)
    other = json.dumps(
        {name: value[name] for name in names}, ensure_ascii=ascii_only, indent=indent
    )
    sampled = reply(("f", json.dumps(value, separators=(",", ":"))))
    assert same(reply(("f", other)), sampled)
    assert same(reply(("f", value)), sampled)
    back, _ = restored(reply(("f", other)), sampled)
    assert [*json.loads(back["tool_calls"][0]["function"]["arguments"])] == [*value]


@given(objects, st.text(), values)
def test_arguments_that_say_something_else_are_not_the_same(
    value: dict[str, Any], name: str, item: Any
) -> None:
    changed = {**value, name: [item]}
    if json.dumps(changed, sort_keys=True) == json.dumps(value, sort_keys=True):
        return
    assert not same(reply(("f", json.dumps(changed))), reply(("f", json.dumps(value))))


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
def test_values_that_look_alike_are_told_apart(one: str, other: str) -> None:
    assert not same(reply(("f", one)), reply(("f", other)))
    assert same(reply(("f", one)), reply(("f", one)))


def test_what_is_no_json_is_compared_as_it_is() -> None:
    assert same(reply(("f", "{cut off")), reply(("f", "{cut off")))
    assert same(reply(("f", "")), reply(("f", "{}")))


def test_content_reasoning_and_order_count() -> None:
    delivered = reply(("f", "{}"), ("g", "{}"), content=" Well. ", reasoning_content="\nHm.\n")
    assert same({**delivered, "content": [{"type": "text", "text": "Well."}]}, delivered)
    assert same({**delivered, "reasoning_content": None}, delivered)
    assert same({**delivered, "reasoning": "Hm.", "reasoning_content": None}, delivered)
    assert not same({**delivered, "reasoning_content": "No."}, delivered)
    assert not same({**delivered, "content": "Well!"}, delivered)
    assert not same({**delivered, "tool_calls": delivered["tool_calls"][::-1]}, delivered)
    assert not same({**delivered, "tool_calls": delivered["tool_calls"][:1]}, delivered)


def test_what_is_put_back_is_told() -> None:
    delivered = reply(("f", '{"b":1,"a":2}'), reasoning_content="Hm.")
    assert restored(delivered, delivered)[1] == []
    assert restored(reply(("f", '{"a":2,"b":1}'), reasoning_content="Hm."), delivered)[1] == [
        "arguments"
    ]
    assert restored(reply(("f", '{"b": 1, "a": 2}')), delivered)[1] == ["reasoning"]


@pytest.mark.parametrize("calls", [None, "x", [None], [{}], [{"function": 7}], [{"function": {}}]])
def test_calls_of_no_shape_are_no_reply(calls: Any) -> None:
    strange = {"role": "assistant", "tool_calls": calls}
    assert not same(strange, reply(("f", "{}")))
    assert len(Keys([strange]).known) == 1


# -- keys ----------------------------------------------------------------------------------------


def said(*messages: Message) -> str:
    *_, names = Keys(messages).known.values()
    return names[-1]


USER = {"role": "user", "content": "Hi"}


def test_a_reply_has_a_key_for_each_call_and_one_for_all_that_was_said() -> None:
    [(index, names)] = Keys([USER, reply(("f", "{}"), ("g", "{}"))]).known.items()
    assert index == 1
    assert names[:2] == ["call:c0", "call:c1"]
    assert names[2].startswith("said:")


def test_the_key_of_what_was_said_is_the_same_however_it_is_written() -> None:
    one = said(USER, reply(("f", '{"b":1,"a":2}'), reasoning_content="Hm."))
    other = reply(("f", '{"a": 2, "b": 1.0}'), content="")
    other["tool_calls"][0]["id"] = "another"
    assert said(USER, other) == one


def test_the_key_of_what_was_said_depends_on_everything_before() -> None:
    messages = [USER, reply(("f", "{}")), {"role": "tool", "content": "x"}, reply(("g", "{}"))]
    edits: list[tuple[int, Message]] = [
        (0, {"role": "user", "content": "Ho"}),
        (0, {"role": "system", "content": "Hi"}),
        (1, reply(("f", '{"a": 1}'))),
        (2, {"role": "tool", "content": "y"}),
        (3, reply(("h", "{}"))),
    ]
    found = {said(*messages)}
    for at, message in edits:
        found.add(said(*messages[:at], message, *messages[at + 1 :]))
    found.add(said(*messages[1:]))
    assert len(found) == len(edits) + 2


@given(st.lists(st.text(), min_size=2, max_size=2), st.lists(st.text(), min_size=2, max_size=2))
def test_messages_never_run_into_each_other(one: list[str], other: list[str]) -> None:
    keyed = [
        said(*({"role": "assistant", "content": text} for text in texts)) for texts in (one, other)
    ]
    stripped = [[text.strip() for text in texts] for texts in (one, other)]
    assert (keyed[0] == keyed[1]) == (stripped[0] == stripped[1])


# -- places --------------------------------------------------------------------------------------


def test_a_reply_ends_at_an_end_token_of_the_template_and_at_no_other() -> None:
    ends = Ends(["<|im_end|>", "<|eot|>"])
    marked = mark(
        [
            Span("Hello ", literal=False),
            Span("<|im_end|>", literal=True),
            Span(" there<|eot|>\n<|im_end|>", literal=False),
        ]
    )
    end = ends.after(marked, 0)
    assert end is not None
    assert marked[end:].startswith(b"<|eot|>")
    assert ends.after(marked, end + 1) == marked.rindex(b"<|im_end|>")
    assert ends.after(b"Hello", 0) is None
    assert Ends([]).after(b"Hello<|im_end|>", 0) is None


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
    delivered = reply(("f", "{}"), ("g", "{}"), content="Well.\n", reasoning_content="Hm.\n")
    assert shows(body, delivered) is is_shown


def test_reasoning_is_not_shown_by_content_that_repeats_it() -> None:
    delivered = {"role": "assistant", "content": "Paris.", "reasoning_content": "Paris."}
    assert not shows(b"Paris.", delivered)
    assert shows(b"<think>Paris.</think>Paris.", delivered)
