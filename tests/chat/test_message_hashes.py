from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.chat.message_hashes import ConversationHashes, Segments

SYSTEM = {"role": "system", "content": "Be brief."}
HI = {"role": "user", "content": "hi"}
HELLO = {"role": "assistant", "content": "hello"}
WHY = {"role": "user", "content": "why?"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "now"}}]}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "noon"}
TOOLS = [{"name": "a", "parameters": {"x": 1, "y": 2}}, {"name": "b"}]
CHAT = [SYSTEM, HI, HELLO, WHY]


def segments(messages: list[dict[str, Any]], tools: list[Any] | None) -> Segments:
    return ConversationHashes(messages, tools).segments


def change(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> str | None:
    return ConversationHashes(after, TOOLS).first_change(segments(before, TOOLS))


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
    stored = segments(CHAT, TOOLS)
    assert ConversationHashes(CHAT[1:]).first_change(stored) == "system"
    assert ConversationHashes(CHAT).first_change(stored) == "tools"
    assert change(CHAT, [SYSTEM, other, HELLO, WHY]) == "turn 1"
    assert change(CHAT, [SYSTEM, HI, {**HELLO, "content": "hm"}, WHY]) == "turn 1"
    assert change(CHAT, [SYSTEM, HI, HELLO, other]) == "turn 2"


def test_a_system_message_that_was_added_is_a_changed_system() -> None:
    assert change(CHAT[1:], CHAT) == "system"


def test_a_request_that_ends_early_lacks_a_turn() -> None:
    assert change(CHAT, CHAT[:3]) == "turn 2"
    assert change(CHAT, CHAT[:2]) == "turn 1"


def test_a_continued_conversation_has_not_changed() -> None:
    assert change(CHAT[:3], CHAT) is None
    assert change([], CHAT[1:]) is None


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_a_last_turn_that_grew_has_not_changed(kept: int) -> None:
    agent: list[dict[str, Any]] = [HI, CALL, RESULT, HELLO, WHY]
    assert change(agent[:kept], agent) is None
    assert change(agent[:kept], agent[: kept + 1]) is None


def test_only_the_last_stored_turn_may_have_grown() -> None:
    assert change([HI, WHY], [HI, HELLO, WHY]) == "turn 1"


def test_segments_cannot_distinguish_a_grown_turn_from_a_changed_one() -> None:
    grown = segments([HI, HELLO, WHY], None)
    assert segments([HI], None)[0] != grown[0]
    assert change([HI], [HI, HELLO, WHY]) is None
    assert ConversationHashes([]).first_change(segments([HI], None)) == "turn 1"


@pytest.mark.parametrize("count", range(5))
def test_segments_after_a_reply_equal_those_of_the_whole_conversation(count: int) -> None:
    talk = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "And?"},
    ]
    reply = {"role": "assistant", "content": "So."}
    hashes = ConversationHashes(talk[:count])
    assert hashes.segments == segments(talk[:count], None) == hashes.as_sent().segments
    after = hashes.after(reply)
    assert after == hashes.after(reply)
    assert after.segments == segments([*talk[:count], reply], None)


@pytest.mark.parametrize("count", range(5))
def test_a_reply_s_keys_and_fingerprint_are_those_of_the_whole_conversation(count: int) -> None:
    talk = [SYSTEM, HI, HELLO, WHY][:count]
    called = {**CALL, "tool_calls": [{"id": "c1", "function": {"name": "now"}}]}
    whole, after = ConversationHashes([*talk, called]), ConversationHashes(talk).after(called)
    assert after.reply_keys == whole.reply_keys[count]
    assert after.reply_keys[0] == "call:c1"
    assert after.fingerprint == whole.fingerprint
    assert whole.as_sent().reply_keys == ()


def test_hashes_equal_those_that_earlier_versions_stored() -> None:
    """Entries on disk contain the hashes. Other values would orphan these entries."""
    arguments = '{"b": 1.0, "a": "\\u00e9"}'
    call = {"id": "c1", "type": "function"} | {
        "function": {"name": "weather", "arguments": arguments}
    }
    parts = [{"type": "text", "text": "Weather "}, {"type": "text", "text": "in Paris?"}]
    talk: list[dict[str, Any]] = [
        SYSTEM,
        {"role": "user", "content": parts, "message_id": "m1"},
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "Rain."},
        {"role": "assistant", "content": "It rains. "},
        {"role": "user", "content": "And tomorrow?"},
    ]
    function = {"name": "weather", "parameters": {"type": "object"}}
    hashes = ConversationHashes(talk, [{"type": "function", "function": function}])
    after = hashes.after({"role": "assistant", "content": "Sun."})
    before = (("system", "50939907632b2a17"), ("tools", "1e59b561bef93a27"))
    first = ("turn", "6fad7b70ed3d57c3")
    assert hashes.segments == (*before, first, ("turn", "3e03dc6e7e226ff9"))
    assert after.segments == (*before, first, ("turn", "5cba4e463b88860c"))
    assert hashes.reply_keys == {
        2: (
            "call:c1",
            "said:1d3ecc145771949d913100c56c07ed5d222bea93ad34a67896f642b6b149dad7",
        ),
        4: ("said:8e4a2d2062911c4627b88a01f2fb84431457c8bc88a9c0c86cc8fe26bbb5cb58",),
    }
    assert after.reply_keys == (
        "said:2a55912b388e82d4828b980c8dc0947fb24ab2a50e7ba567e7bf4ae8e906ebcb",
    )
    assert [hashes.fingerprint, hashes.previous_fingerprint, after.fingerprint] == [
        "ca3ccae032969bd1a09982d413249710f9c3699f6b426d400c1283586d24aba6",
        "8da2ad1c9ccc4863df485be873c574f645db5b53bdcc18f76ef7d7527a603809",
        "eb0a21194dc29caac414d64f500b43ad989845d9c13e4a4072ec431f0bf77afb",
    ]


# -- fingerprints ------------------------------------------------------------------------------

LONG = "first thirty-two characters here" + "*" * 20 + "last thirty-two characters here!"

roles = st.sampled_from(["system", "user", "assistant", "tool"])
messages = st.lists(
    st.fixed_dictionaries({"role": roles, "content": st.text(max_size=40)}), max_size=4
)


def fingerprint(messages: list[dict[str, Any]]) -> str:
    return ConversationHashes(messages).fingerprint


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


def test_a_fingerprint_depends_only_on_the_end_of_a_reply() -> None:
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


def test_the_previous_fingerprint_ends_before_the_last_user_message() -> None:
    talk = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "3"},
    ]
    assert ConversationHashes(talk).previous_fingerprint == fingerprint(talk[:3])
    longer = [*talk, {"role": "tool", "content": "4"}]
    assert ConversationHashes(longer).previous_fingerprint == fingerprint(talk[:3])


@pytest.mark.parametrize("roles", [[], ["user"], ["system", "user"], ["system"], ["assistant"]])
def test_a_first_question_continues_nothing(roles: list[str]) -> None:
    messages = [{"role": role, "content": "x"} for role in roles]
    assert ConversationHashes(messages).previous_fingerprint is None


def looks(messages: list[dict[str, str]]) -> list[tuple[object, ...]]:
    return [
        (role, text[-32:]) if role == "assistant" else (role, len(text), text[:32], text[-32:])
        for role, text in ((message["role"], message["content"]) for message in messages)
    ]


# -- reply keys --------------------------------------------------------------------------------


def reply(*calls: tuple[str, Any], **fields: Any) -> dict[str, Any]:
    functions = ({"name": name, "arguments": arguments} for name, arguments in calls)
    listed = [{"id": f"c{n}", "function": function} for n, function in enumerate(functions)]
    return {"role": "assistant", "content": None, "tool_calls": listed, **fields}


def history_key(*messages: dict[str, Any]) -> str:
    *_, keys = ConversationHashes(messages).reply_keys.values()
    return keys[-1]


def test_a_reply_has_a_key_for_each_call_and_one_for_all_that_was_said() -> None:
    messages = [HI, reply(("f", "{}"), ("g", "{}"))]
    [(index, keys)] = ConversationHashes(messages).reply_keys.items()
    assert index == 1
    assert keys[:2] == ("call:c0", "call:c1")
    assert keys[2].startswith("said:")


def test_history_keys_are_equal_in_any_json_formatting() -> None:
    one = history_key(HI, reply(("f", '{"b":1,"a":2}'), reasoning_content="Hm."))
    other = reply(("f", '{"a": 2, "b": 1.0}'), content="")
    other["tool_calls"][0]["id"] = "another"
    assert history_key(HI, other) == one


def test_history_keys_depend_on_all_earlier_messages() -> None:
    messages = [HI, reply(("f", "{}")), {"role": "tool", "content": "x"}, reply(("g", "{}"))]
    edits: list[tuple[int, dict[str, Any]]] = [
        (0, {"role": "user", "content": "Ho"}),
        (0, {"role": "system", "content": "hi"}),
        (1, reply(("f", '{"a": 1}'))),
        (2, {"role": "tool", "content": "y"}),
        (3, reply(("h", "{}"))),
    ]
    found = {history_key(*messages)}
    for at, message in edits:
        found.add(history_key(*messages[:at], message, *messages[at + 1 :]))
    found.add(history_key(*messages[1:]))
    assert len(found) == len(edits) + 2


@given(st.lists(st.text(), min_size=2, max_size=2), st.lists(st.text(), min_size=2, max_size=2))
def test_messages_never_run_into_each_other(one: list[str], other: list[str]) -> None:
    keyed = [
        history_key(*({"role": "assistant", "content": text} for text in texts))
        for texts in (one, other)
    ]
    stripped = [[text.strip() for text in texts] for texts in (one, other)]
    assert (keyed[0] == keyed[1]) == (stripped[0] == stripped[1])


@pytest.mark.parametrize("arguments", ["", " ", "{}", {}])
def test_a_call_without_arguments_has_one_key_in_any_form(arguments: Any) -> None:
    assert history_key(HI, reply(("f", arguments))) == history_key(HI, reply(("f", "{}")))


@pytest.mark.parametrize("calls", [None, "x", [None], [{}], [{"function": 7}], [{"function": {}}]])
def test_calls_of_no_shape_have_a_key(calls: Any) -> None:
    assert len(ConversationHashes([{"role": "assistant", "tool_calls": calls}]).reply_keys) == 1
