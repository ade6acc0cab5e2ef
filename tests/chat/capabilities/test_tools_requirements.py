"""Templates with extra requirements for tools get them, other templates do not."""

from __future__ import annotations

from typing import Any

import pytest

from rekindle.chat.template import ChatTemplate
from tests.chat.tool_templates import CHANNELS, DESCRIBED, HERMES, NINE, ONE_CALL, STRINGS, THINKING

USER = {"role": "user", "content": "?"}
BARE = [{"type": "function", "function": {"name": "look"}}]


def calling(*ids: Any) -> dict[str, Any]:
    calls = [
        {"id": id, "type": "function", "function": {"name": f"f{n}", "arguments": {"n": n}}}
        for n, id in enumerate(ids)
    ]
    return {"role": "assistant", "content": "Well.", "tool_calls": calls}


def result(id: Any, content: str = "!") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": content}


def rendered(source: str, *messages: dict[str, Any], tools: Any = BARE) -> str:
    return ChatTemplate(source).render(list(messages), tools=tools, add_generation_prompt=False)


@pytest.mark.parametrize(
    "parameters", [{}, {"parameters": {}}, {"parameters": {"type": "object", "properties": {}}}]
)
def test_a_function_without_a_description_gets_one_where_a_template_requires_it(
    parameters: dict[str, Any],
) -> None:
    tools = [{"type": "function", "function": {"name": "look", **parameters}}]
    assert "// \ntype look = " in rendered(DESCRIBED, USER, tools=tools)


def test_fields_of_a_function_that_a_client_sent_are_kept() -> None:
    tools = [{"type": "function", "function": {"name": "look", "description": "Look around."}}]
    assert "// Look around.\n" in rendered(DESCRIBED, USER, tools=tools)


def test_parameters_are_added_for_a_template_that_iterates_over_them() -> None:
    source = (
        "{% for t in tools or [] %}{{ t.function.name + ':' }}"
        "{% for k, v in t.function.parameters.properties.items() %}"
        "{{ k + '=' + v.description }}{% endfor %}{% endfor %}"
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}{% endfor %}{% endfor %}"
    )
    bare = {"type": "function", "function": {"name": "g", "parameters": {"properties": {"a": {}}}}}
    assert rendered(source, USER, tools=[*BARE, bare]) == "look:g:a=?"


@pytest.mark.parametrize("source", [HERMES, THINKING])
def test_other_templates_get_the_messages_unchanged(source: str) -> None:
    assert '{"type": "function", "function": {"name": "look"}}' in rendered(source, USER)


@pytest.mark.parametrize("id", ["call_abcdefghijklmnop", "", None, "call_<|im_end|>", "é" * 9])
def test_ids_of_other_servers_get_the_length_that_a_template_requires(id: Any) -> None:
    talk = [USER, calling(id), result(id or "x", "7")]
    text = rendered(NINE, *talk)
    assert text == rendered(NINE, *talk)  # or nothing of it would ever be reused
    assert '"arguments": {"n": 0}, "id": "' in text


def test_a_call_and_its_result_keep_one_id() -> None:
    text = rendered(NINE, USER, calling("call_1", "call_2"), result("call_1"), result("call_2"))
    ids = [text.split(f'"n": {n}}}, "id": "')[1][:9] for n in (0, 1)]
    assert ids[0] != ids[1]
    assert all(text.count(id) == 2 for id in ids)


def test_an_id_that_fits_stays() -> None:
    assert '"id": "aB3456789"' in rendered(NINE, USER, calling("aB3456789"), result("aB3456789"))


@pytest.mark.parametrize("source", [ONE_CALL, CHANNELS, DESCRIBED])
def test_calls_side_by_side_are_shown_one_by_one_where_only_one_can_be(source: str) -> None:
    """Such a template refuses the second call or omits it."""
    text = rendered(
        source, USER, calling("a", "b"), result("b", "second"), result("a", "first"), USER
    )
    places = [text.index(word) for word in ("f0", "first", "f1", "second")]
    assert places == sorted(places)
    assert text.count("f0") == text.count("f1") == 1


def test_results_that_belong_to_no_call_are_shown_all_the_same() -> None:
    text = rendered(ONE_CALL, USER, calling("a", "b"), result("c", "third"), result("a", "first"))
    assert text.count("third") == text.count("first") == 1


@pytest.mark.parametrize("source", [HERMES, STRINGS, NINE])
def test_calls_side_by_side_stay_so_where_they_can(source: str) -> None:
    template = ChatTemplate(source)
    talk = [USER, calling("a", "b"), result("a"), result("b")]
    text = template.render(talk, tools=BARE, add_generation_prompt=False)
    assert text.index("f1") < text.index("!")
