from __future__ import annotations

from typing import Any

import pytest

from rekindle.chat.message_hashes import Told, first_change, segments

SYSTEM = {"role": "system", "content": "Be brief."}
HI = {"role": "user", "content": "hi"}
HELLO = {"role": "assistant", "content": "hello"}
WHY = {"role": "user", "content": "why?"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "now"}}]}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "noon"}
TOOLS = [{"name": "a", "parameters": {"x": 1, "y": 2}}, {"name": "b"}]
CHAT = [SYSTEM, HI, HELLO, WHY]


def change(
    before: list[dict[str, Any]], after: list[dict[str, Any]], *, told: bool = True
) -> str | None:
    stored, sent = segments(before, TOOLS), segments(after, TOOLS)
    return first_change(stored, sent, after if told else ())


def test_a_conversation_is_its_system_its_tools_and_its_turns() -> None:
    found = segments([*CHAT, CALL, RESULT], TOOLS)
    assert [kind for kind, _ in found] == ["system", "tools", "turn", "turn"]
    assert all(len(hash) == 16 and int(hash, 16) >= 0 for _, hash in found)
    assert len(set(found)) == 4
    assert [kind for kind, _ in segments([HI], None)] == ["turn"]
    assert segments([], []) == ()


def test_all_system_messages_count_together_wherever_they_stand() -> None:
    late = {"role": "developer", "content": "Be kind."}
    (system, turn) = segments([SYSTEM, HI, late, HELLO], None)
    assert (system, turn) == segments([SYSTEM, late, HI, HELLO], None)
    assert system != segments([SYSTEM, HI], None)[0]


def test_neither_the_order_of_tools_nor_of_their_keys_matters() -> None:
    turned = [{"name": "b"}, {"parameters": {"y": 2, "x": 1}, "name": "a"}]
    assert segments(CHAT, turned) == segments(CHAT, TOOLS)
    assert segments(CHAT, [*TOOLS, {"name": "c"}]) != segments(CHAT, TOOLS)


@pytest.mark.parametrize("field", ["content", "role", "tool_calls", "name"])
def test_every_field_counts(field: str) -> None:
    assert segments([HI, {**CALL, field: "x"}], None) != segments([HI, CALL], None)


def test_a_message_s_name_and_its_empty_fields_do_not_count() -> None:
    named = {**HELLO, "message_id": "m1", "tool_calls": None, "refusal": None}
    assert segments([HI, named], None) == segments([HI, HELLO], None)


def test_half_a_character_has_a_hash_like_any_other() -> None:
    assert segments([{"role": "user", "content": "\ud800"}], None)


def test_the_first_change_is_named() -> None:
    other = {"role": "user", "content": "other"}
    assert change(CHAT, CHAT) is None
    assert change(CHAT, [{**SYSTEM, "content": "Be long."}, other]) == "system"
    assert first_change(segments(CHAT, TOOLS), segments(CHAT[1:], None)) == "system"
    assert first_change(segments(CHAT, TOOLS), segments(CHAT, None)) == "tools"
    assert change(CHAT, [SYSTEM, other, HELLO, WHY]) == "turn 1"
    assert change(CHAT, [SYSTEM, HI, {**HELLO, "content": "hm"}, WHY]) == "turn 1"
    assert change(CHAT, [SYSTEM, HI, HELLO, other]) == "turn 2"


def test_a_system_message_that_was_added_is_a_changed_system() -> None:
    assert change(CHAT[1:], CHAT) == "system"


def test_a_request_that_ends_early_lacks_a_turn() -> None:
    assert change(CHAT, CHAT[:3]) == "turn 2"
    assert change(CHAT, CHAT[:2]) == "turn 1"


def test_a_conversation_that_goes_on_has_not_changed() -> None:
    assert change(CHAT[:3], CHAT) is None
    assert change([], CHAT[1:]) is None


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_a_last_turn_that_grew_has_not_changed(kept: int) -> None:
    agent: list[dict[str, Any]] = [HI, CALL, RESULT, HELLO, WHY]
    assert change(agent[:kept], agent) is None
    assert change(agent[:kept], agent[: kept + 1]) is None


def test_only_the_last_stored_turn_may_have_grown() -> None:
    assert change([HI, WHY], [HI, HELLO, WHY]) == "turn 1"


def test_without_the_messages_a_turn_that_grew_looks_changed() -> None:
    assert change([HI], [HI, HELLO, WHY], told=False) == "turn 1"


@pytest.mark.parametrize("count", range(5))
def test_segments_after_a_reply_are_those_of_the_whole_conversation(count: int) -> None:
    talk = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "And?"},
    ]
    reply = {"role": "assistant", "content": "So."}
    told = Told(talk[:count], None)
    assert told.segments == segments(talk[:count], None)
    assert told.after(reply) == told.after(reply) == segments([*talk[:count], reply], None)
