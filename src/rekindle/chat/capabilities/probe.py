"""Trying out what a template renders: templates do not declare it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from rekindle.chat.messages import Message
from rekindle.errors import TemplateFailed

Tools = Sequence[Any]
Render = Callable[[Sequence[Message], Tools | None], str]

NEEDLE = "needle"
_SHOWN = re.compile(f"(?<!['\"]){NEEDLE}(?!['\"])")  # in quotes it is a printed list, not its text

PROBE_TOOL = "needle_tool"
TOOL = {
    "type": "function",
    "function": {
        "name": PROBE_TOOL,
        "description": "Find something.",
        "parameters": {
            "type": "object",
            "properties": {"what": {"type": "string", "description": "What to find."}},
        },
    },
}
USER = {"role": "user", "content": "?"}


def attempt(render: Render, messages: Sequence[Message], tools: Tools | None = None) -> str | None:
    """The rendered text; None when the template fails."""
    try:
        return render(messages, tools)
    except TemplateFailed:
        return None


def shows_needle(rendered: str | None) -> bool:
    """Whether the needle was rendered as text."""
    return rendered is not None and _SHOWN.search(rendered) is not None


def calling(*calls: tuple[str, str, Any]) -> Message:
    """A reply with calls, each given by its name, id and arguments."""
    made = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for name, id, arguments in calls
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


def result(id: str, content: str = "!", **fields: Any) -> Message:
    return {"role": "tool", "content": content, "tool_call_id": id, **fields}
