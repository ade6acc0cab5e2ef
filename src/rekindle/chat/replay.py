"""Recognising an assistant message that a client sends back, and undoing what the client changed.

A client parses the calls of a message and writes them again in another order, with other blanks,
and leaves the reasoning out. Its meaning is the same; its bytes are different.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from rekindle.chat.escaping import CLOSE, OPEN, unescape
from rekindle.chat.messages import (
    Message,
    call_arguments,
    call_name,
    call_values,
    called_function,
    canonical,
    content_text,
    parse_json,
    reasoning_text,
    tool_calls,
)

ARGUMENTS_RESTORED, REASONING_RESTORED = "arguments", "reasoning"


def same_message(sent: Message, original: Message) -> bool:
    """Whether both have the same content and calls; the sent one may leave the reasoning out."""
    reasoning = reasoning_text(sent)
    return _compared(sent) == _compared(original) and reasoning in ("", reasoning_text(original))


def restored(
    sent: Message, original: Message, *, reasoning: bool = True
) -> tuple[Message, list[str]]:
    """A message with the arguments of its calls and the reasoning of the original; and the names
    of what that changed."""
    calls, originals = list(tool_calls(sent)), list(tool_calls(original))
    changes = []
    if list(map(_printed_arguments, calls)) != list(map(_printed_arguments, originals)):
        pairs = zip(calls, map(call_arguments, originals), strict=True)
        calls = [_with_arguments(call, arguments) for call, arguments in pairs]
        changes.append(ARGUMENTS_RESTORED)
    message = {**sent, "tool_calls": calls}
    if reasoning and reasoning_text(original) and not reasoning_text(sent):
        message["reasoning_content"] = original["reasoning_content"]
        changes.append(REASONING_RESTORED)
    return message, changes


def shows_whole(rendered: bytes, message: Message) -> bool:
    """Whether escaped bytes of a prompt show all of a message: a template may leave the reasoning
    out, and may render what follows a message's first end token as a message of its own."""
    text = unescape(rendered).decode(errors="replace")
    content, reasoning = _text(message), reasoning_text(message)
    at = text.rfind(content)
    if at < 0 or reasoning not in text[:at] + "\0" + text[at + len(content) :]:
        return False
    at = 0
    for name in map(call_name, tool_calls(message)):
        at = text.find(name, at)
        if at < 0:
            return False
        at += len(name)
    return True


class EndMarkers:
    """Where assistant messages end in escaped bytes: at an end token that the template wrote."""

    def __init__(self, texts: Iterable[str]) -> None:
        ends = b"|".join(re.escape(text.encode()) for text in sorted(texts) if text) or rb"(?!)"
        self._pattern = re.compile(OPEN + b"[^" + CLOSE + b"]*" + CLOSE + b"|(" + ends + b")")

    def first_after(self, escaped: bytes, at: int) -> int | None:
        found = (match for match in self._pattern.finditer(escaped, at) if match[1])
        return next((match.start() for match in found), None)


def _compared(message: Message) -> tuple[Any, str, bytes]:
    return message.get("role"), _text(message), canonical(call_values(message))


def _text(message: Message) -> str:
    return content_text(message.get("content")).strip()


def _printed_arguments(call: Any) -> str:
    """A call's arguments as a template would print them."""
    arguments = call_arguments(call)
    if isinstance(arguments, str):
        with suppress(ValueError):
            arguments = parse_json(arguments.strip() or "{}")
    return json.dumps(arguments)


def _with_arguments(call: Any, arguments: Any) -> Any:
    return {**call, "function": {**called_function(call), "arguments": arguments}}
