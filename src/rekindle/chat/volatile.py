"""What clients put at the top of a system prompt and change with every request.

Whatever differs at the top makes everything below it new to a cache. Taken out, or made coarser, is
only what is known by its exact shape, stands at the very beginning, and means nothing to a user.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from rekindle.chat.content import Message

SYSTEM_ROLES = ("system", "developer")


class Header(NamedTuple):
    """A known beginning. Its pattern takes time linear in what it matches."""

    name: str
    pattern: re.Pattern[str]
    replacement: str  # with the groups of the match


HEADERS = (
    # Claude Code (claude-code #68900): who pays, and a hash of the request. Written for one
    # provider's billing; the model no longer sees it at all.
    Header(
        "claude-code-billing-header",
        re.compile(r"\Ax-anthropic-billing-header:(?: ?[a-z_]+=[^;\n]*;)+[ \t]*\n{0,2}"),
        "",
    ),
    # Home Assistant (core #133687): the model no longer sees the seconds of the time of day.
    Header(
        "home-assistant-seconds",
        re.compile(r"\A(Current time is \d\d:\d\d):\d\d(\. Today's date is \d{4}-\d\d-\d\d\.)"),
        r"\1\2",
    ),
    # goose (#4610, and #5192, where goose did the same): the model no longer sees minutes and
    # seconds of the time at which its prompt was made.
    Header(
        "goose-minutes",
        re.compile(
            r"\A(You are an? (?:general[- ]purpose )?AI agent called [Gg]oose\b[^\n]{0,400}\n\n"
            r"The current date is \d{4}-\d\d-\d\d \d\d):\d\d:\d\d\."
        ),
        r"\1:00.",
    ),
)


def settled(messages: Sequence[Message]) -> tuple[list[Message], list[str]]:
    """The messages without what is volatile at their top, and the names of what was found there."""
    leading = list(takewhile(lambda each: each.get("role") in SYSTEM_ROLES, messages))
    found: list[str] = []
    changed = [_settled(message, found) for message in leading]
    kept = [each for each in changed if each is not None]
    return [*kept, *messages[len(leading) :]], found


def _settled(message: Message, found: list[str]) -> Message | None:
    """None when nothing is left of it."""
    content = message.get("content")
    if isinstance(content, str):
        text = _beginning(content, found)
        return message if text == content else {**message, "content": text} if text else None
    first: Any = content[0] if isinstance(content, list) and content else None
    if not (isinstance(first, dict) and isinstance(first.get("text"), str)):
        return message
    text = _beginning(first["text"], found)
    if text == first["text"]:
        return message
    assert isinstance(content, list)
    parts = [{**first, "text": text}, *content[1:]] if text else content[1:]
    return {**message, "content": parts} if parts else None


def _beginning(text: str, found: list[str]) -> str:
    for header in HEADERS:
        if match := header.pattern.match(text):
            text = match.expand(header.replacement) + text[match.end() :]
            found.append(header.name)
    return text
