from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.chat.fingerprint import fingerprint, previous

LONG = "first thirty-two characters here" + "*" * 20 + "last thirty-two characters here!"

roles = st.sampled_from(["system", "user", "assistant", "tool"])
messages = st.lists(
    st.fixed_dictionaries({"role": roles, "content": st.text(max_size=40)}), max_size=4
)


def one(role: str, content: Any) -> str:
    return fingerprint([{"role": role, "content": content}])


@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_a_message_is_known_by_its_role_length_and_both_ends(role: str) -> None:
    known = one(role, LONG)
    assert one(role, LONG.replace("*", "+")) == known  # the middle is not looked at
    assert one(role, LONG.replace("*", "", 1)) != known
    assert one(role, "F" + LONG[1:]) != known
    assert one(role, LONG[:-1] + "?") != known
    assert one("other", LONG) != known


def test_a_reply_is_known_by_its_end_alone() -> None:
    known = one("assistant", LONG)
    assert one("assistant", "<think>much</think>" + LONG) == known
    assert one("assistant", LONG[-32:]) == known
    assert one("assistant", LONG[:-1]) != known


def test_parts_look_like_the_text_in_them() -> None:
    parts = [{"type": "text", "text": "he"}, {"type": "image"}, {"type": "text", "text": "llo"}]
    assert one("user", parts) == one("user", "hello")
    assert one("assistant", None) == one("assistant", "")


def test_names_do_not_count() -> None:
    assert fingerprint([{"role": "user", "content": "a", "message_id": "m"}]) == one("user", "a")


@settings(deadline=None)  # the machine may be busy
@given(messages, messages)
def test_conversations_that_look_different_never_meet(
    first: list[dict[str, str]], second: list[dict[str, str]]
) -> None:
    assert (fingerprint(first) == fingerprint(second)) == (looks(first) == looks(second))


def test_text_moved_from_one_message_to_the_next_is_another_conversation() -> None:
    def replies(*texts: str) -> str:
        return fingerprint([{"role": "assistant", "content": text} for text in texts])

    assert replies("ab", "c") != replies("a", "bc")


def test_half_a_character_has_a_fingerprint() -> None:
    assert one("user", "\ud800") != one("user", "?")


def test_a_request_continues_what_came_before_its_last_user_message() -> None:
    talk = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "3"},
    ]
    assert list(previous(talk)) == talk[:3]
    assert list(previous([*talk, {"role": "tool", "content": "4"}])) == talk[:3]


@pytest.mark.parametrize("roles", [[], ["user"], ["system", "user"], ["system"], ["assistant"]])
def test_a_first_question_continues_nothing(roles: list[str]) -> None:
    assert not previous([{"role": role, "content": "x"} for role in roles])


def looks(messages: list[dict[str, str]]) -> list[tuple[object, ...]]:
    return [
        (role, text[-32:]) if role == "assistant" else (role, len(text), text[:32], text[-32:])
        for role, text in ((message["role"], message["content"]) for message in messages)
    ]
