"""Dates in what agents put before a conversation, which make each day's prompt a new one.

opencode has the day in its system prompt, Claude Code, Codex and Qwen Code have it in what they put
into the first user message. Without the day of the month it changes once a month; but a model that
is asked what day it is then does not know. So this is done only where it is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from rekindle.chat.messages import SYSTEM_ROLES, Message

_MONTH = "(?:Jan|Feb|Mar|Apr|May|June?|July?|Aug|Sept?|Oct|Nov|Dec)[a-z]{0,6}"
_WEEKDAY = "(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]{0,6}"
#: The announcement of a date, as far as its month, its year, and what there is of it between.
_DATE = re.compile(
    r"((?:[Tt]oday's date|[Cc]urrent date)(?: is)?:? |<current_date>)"
    rf"(?:(\d{{4}}-\d\d)-\d\d|(?:{_WEEKDAY},? )?({_MONTH}) \d{{1,2}},? (\d{{4}}))(?!\d)"
)
#: What agents put before a user's own words, which are never changed.
_CONTEXT = re.compile(r"\s*<(environment_context|system-reminder)>.*?</\1>", re.DOTALL)


def without_days(messages: Sequence[Message]) -> tuple[list[Message], bool]:
    """The messages with the month alone where an agent says the date before the first reply; and
    whether one did."""
    opening = list(takewhile(lambda each: each.get("role") in (*SYSTEM_ROLES, "user"), messages))
    changed = [_without_day(each) for each in opening]
    if changed == opening:
        return list(messages), False
    return [*changed, *messages[len(opening) :]], True


def _without_day(message: Message) -> Message:
    in_system = message.get("role") in SYSTEM_ROLES
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": _shortened(content, in_system)}
    if isinstance(content, list):
        return {**message, "content": [_shortened_part(part, in_system) for part in content]}
    return message


def _shortened_part(part: Any, in_system: bool) -> Any:
    if not (isinstance(part, Mapping) and isinstance(part.get("text"), str)):
        return part
    return {**part, "text": _shortened(part["text"], in_system)}


def _shortened(text: str, in_system: bool) -> str:
    if in_system:
        return _DATE.sub(_month, text)
    context = _CONTEXT.match(text)
    end = context.end() if context else 0
    return _DATE.sub(_month, text[:end]) + text[end:]


def _month(found: re.Match[str]) -> str:
    announced, iso, month, year = found.groups()
    return f"{announced}{iso or f'{month} {year}'}"
