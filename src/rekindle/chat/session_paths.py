"""Paths of a client's session in its system prompt, which make each session's prompt a new one.

GitHub's Copilot CLI names `~/.copilot/session-state/<UUID>` in the middle of its system prompt:
all after it, tools included, is new in the next session. Without the id it is not; but a model
that uses the path then uses one that does not exist. So this is done only where it is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from rekindle.chat.messages import SYSTEM_ROLES, Message

STAND_IN = "session"

#: A folder that is a UUID, or one in a folder of sessions whose name has a digit in it.
_SESSION = re.compile(
    r"(?<=[/\\])"
    r"(?:[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}"
    r"|(?:(?<=/session-state/)|(?<=\\session-state\\)|(?<=/sessions/)|(?<=\\sessions\\))"
    r"(?=[A-Za-z_-]{0,63}[0-9])[\w-]{8,64})"
    r"(?![\w-])"
)


def without_session_paths(messages: Sequence[Message]) -> tuple[list[Message], bool]:
    """The messages with a stand-in for the session's folder in the leading system messages; and
    whether there was one."""
    leading = list(takewhile(lambda each: each.get("role") in SYSTEM_ROLES, messages))
    changed = [{**each, "content": _without(each.get("content"))} for each in leading]
    if changed == leading:
        return list(messages), False
    return [*changed, *messages[len(leading) :]], True


def _without(content: Any) -> Any:
    if isinstance(content, str):
        return _SESSION.sub(STAND_IN, content)
    if isinstance(content, list):
        return [_without(part) for part in content]
    if isinstance(content, Mapping) and isinstance(content.get("text"), str):
        return {**content, "text": _without(content["text"])}
    return content
