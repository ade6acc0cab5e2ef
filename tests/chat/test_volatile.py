"""Known volatile headers go, and nothing else does."""

from __future__ import annotations

from typing import Any

import pytest

from rekindle.chat.volatile import HEADERS, settled

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


def system(content: object, role: str = "system") -> dict[str, Any]:
    return {"role": role, "content": content}


def test_every_known_header_is_shown_here() -> None:
    assert {name for name, *_ in SEEN} == {header.name for header in HEADERS}


@pytest.mark.parametrize(("name", "one", "other", "settled_to"), SEEN)
@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_known_header_makes_no_difference_any_more(
    name: str, one: str, other: str, settled_to: str, role: str
) -> None:
    user = {"role": "user", "content": "Hi"}
    for content in (one, other):
        assert settled([system(content, role), user]) == ([system(settled_to, role), user], [name])
        parts = [{"type": "text", "text": content}, {"type": "text", "text": "More."}]
        [message, _], found = settled([system(parts, role), user])
        assert message["content"][0] == {"type": "text", "text": settled_to}
        assert found == [name]


def test_a_part_or_a_message_that_is_only_a_header_goes_with_it() -> None:
    header = "x-anthropic-billing-header: cc_version=2.1.37; cc_entrypoint=cli; cch=fa690;"
    part, rest = {"type": "text", "text": header}, {"type": "text", "text": CLAUDE_CODE}
    assert settled([system([part, rest])])[0] == [system([rest])]
    assert settled([system(header), system(CLAUDE_CODE)])[0] == [system(CLAUDE_CODE)]
    assert settled([system([part])])[0] == []


@pytest.mark.parametrize(("name", "one", "other", "settled_to"), SEEN)
def test_what_a_user_writes_or_quotes_is_left_alone(
    name: str, one: str, other: str, settled_to: str
) -> None:
    histories: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": one}],
        [{"role": "user", "content": "Hi"}, system(one)],
        [system("In the log I see:\n" + one)],
    ]
    for messages in histories:
        assert settled(messages) == (messages, [])


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
def test_what_has_another_shape_is_left_alone(content: object) -> None:
    assert settled([system(content)]) == ([system(content)], [])
