"""Normalising removes known volatile headers, sorts tools and changes nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.chat.normalise import (
    HEADERS,
    normalise,
    ordered_tools,
    without_headers,
    without_strict,
)

CLAUDE_CODE = "You are Claude Code, Anthropic's official CLI for Claude."
GOOSE = (
    "You are a general-purpose AI agent called goose, created by Block, the parent company of "
    "Square, CashApp, and Tidal.\n\nThe current date is {now}.\n\ngoose uses LLM providers"
)
#: name, a prompt, the same a little later, and what both become
SEEN = [
    (
        "claude-code-billing-header",
        "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=sdk-cli; cch=36ee5;\n"
        + CLAUDE_CODE,
        "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=sdk-cli; cch=0aaa9;\n"
        + CLAUDE_CODE,
        CLAUDE_CODE,
    ),
    (
        "claude-code-billing-header",  # blocks put together without a line between them
        "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch=fa690;"
        + CLAUDE_CODE,
        "x-anthropic-billing-header: cc_version=2.1.37.1aa; cc_entrypoint=cli; cch=00000;"
        + CLAUDE_CODE,
        CLAUDE_CODE,
    ),
    (
        "home-assistant-seconds",
        "Current time is 20:37:19. Today's date is 2024-12-20.\nYou are a voice assistant",
        "Current time is 20:37:58. Today's date is 2024-12-20.\nYou are a voice assistant",
        "Current time is 20:37. Today's date is 2024-12-20.\nYou are a voice assistant",
    ),
    (
        "goose-minutes",
        GOOSE.format(now="2025-09-11 08:14:22"),
        GOOSE.format(now="2025-09-11 08:59:01"),
        GOOSE.format(now="2025-09-11 08:00"),
    ),
]


USER = {"role": "user", "content": "Hi"}


def system(content: object, role: str = "system") -> dict[str, Any]:
    return {"role": role, "content": content}


def test_every_known_header_is_shown_here() -> None:
    assert {name for name, *_ in SEEN} == {header.name for header in HEADERS}


@pytest.mark.parametrize(("name", "one", "other", "normalised_to"), SEEN)
@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_known_header_makes_no_difference_any_more(
    name: str, one: str, other: str, normalised_to: str, role: str
) -> None:
    after = system(normalised_to, role)
    for content in (one, other):
        assert without_headers([system(content, role), USER]) == ([after, USER], [name])
        parts = [{"type": "text", "text": content}, {"type": "text", "text": "More."}]
        [message, _], found = without_headers([system(parts, role), USER])
        assert message["content"][0] == {"type": "text", "text": normalised_to}
        assert found == [name]


def test_a_part_or_a_message_that_is_only_a_header_goes_with_it() -> None:
    header = "x-anthropic-billing-header: cc_version=2.1.37; cc_entrypoint=cli; cch=fa690;"
    part, rest = {"type": "text", "text": header}, {"type": "text", "text": CLAUDE_CODE}
    assert without_headers([system([part, rest])])[0] == [system([rest])]
    assert without_headers([system(header), system(CLAUDE_CODE)])[0] == [system(CLAUDE_CODE)]
    assert without_headers([system([part])])[0] == []


@pytest.mark.parametrize(("name", "one", "other", "normalised_to"), SEEN)
def test_text_that_a_user_writes_or_quotes_stays_unchanged(
    name: str, one: str, other: str, normalised_to: str
) -> None:
    histories: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": one}],
        [{"role": "user", "content": "Hi"}, system(one)],
        [system("In the log I see:\n" + one)],
    ]
    for messages in histories:
        assert without_headers(messages) == (messages, [])


@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        [],
        [{"type": "image_url"}],
        "x-anthropic-billing-header is a header",
        "x-anthropic-billing-header: " + "a=" * 50_000,
        "Current time is late. Today's date is 2024-12-20.",
        "The current date is 2025-09-11 08:14:22.",
        "You are an AI agent called goose" + " and so on" * 10_000,
    ],
)
def test_other_content_stays_unchanged(content: object) -> None:
    assert without_headers([system(content)]) == ([system(content)], [])


# -- tools --------------------------------------------------------------------------------------


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters or {}}}


@given(st.permutations([tool(name) for name in ("read", "write", "list", "grep")]))
def test_tools_are_sorted_by_name(tools: list[Any]) -> None:
    assert [each["function"]["name"] for each in ordered_tools(tools)] == [
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
    assert json.dumps(ordered_tools([strict])) == json.dumps(ordered_tools([loose]))
    assert normalise([USER], [strict]).changes == ["tools"]
    assert normalise([USER], ordered_tools([loose])).changes == []


def test_properties_stay_as_their_author_has_them() -> None:
    """A model fills in arguments in the order of the schema, for example reasoning first."""
    schema = {"type": "object", "properties": {"thought": {}, "answer": {}, "type": {}}}
    [after] = ordered_tools([tool("f", schema)])
    assert list(after["function"]["parameters"]["properties"]) == ["thought", "answer", "type"]


def test_values_are_not_mistaken_for_keywords() -> None:
    schema = {"default": {"z": 1, "type": 2}, "enum": ["z", "a"], "const": {"z": 1, "a": 2}}
    [after] = ordered_tools([tool("f", schema)])
    assert json.dumps(after["function"]["parameters"]["default"]) == '{"z": 1, "type": 2}'
    assert after["function"]["parameters"]["enum"] == ["z", "a"]


def test_malformed_tools_are_passed_on() -> None:
    strange: list[Any] = ["x", {"type": "web_search"}, {"function": 7}, tool("f")]
    assert sorted(map(json.dumps, ordered_tools(strange))) == sorted(map(json.dumps, strange))


def test_a_request_is_normalised_as_a_whole() -> None:
    _, one, _, normalised_to = SEEN[0]
    tools = [tool("b"), tool("a")]
    messages, in_order, changes = normalise([system(one), USER], tools)
    assert messages == [system(normalised_to), USER]
    assert in_order == [tool("a"), tool("b")]
    assert changes == ["claude-code-billing-header", "tools"]


@pytest.mark.parametrize("tools", [None, []])
def test_a_request_with_only_a_header_stays_unchanged(tools: list[Any] | None) -> None:
    messages = [system("x-anthropic-billing-header: a=1;")]
    assert normalise(messages, tools) == (messages, tools, [])


def test_the_prompt_does_not_show_how_strictly_a_tool_is_enforced() -> None:
    strict = {"type": "function", "function": {"name": "f", "strict": True}}
    strange: list[Any] = ["x", {"type": "web_search"}, {"function": 7}, tool("g")]
    shown = without_strict([strict, *strange])
    assert shown == [{"type": "function", "function": {"name": "f"}}, *strange]
    assert without_strict([]) is without_strict(None) is None
