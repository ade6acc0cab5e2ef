"""What a message says, in whichever of its forms a client sends it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rekindle.chat.arguments import parse
from rekindle.chat.content import Message

SYSTEM_ROLES = ("system", "developer")
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")


def content_text(message: Message, separator: str) -> str:
    """The text of a message's content: a string, or the text parts of a list."""
    content = message.get("content")
    if isinstance(content, list):
        texts = (part.get("text") for part in content if isinstance(part, Mapping))
        return separator.join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else ""


def reasoning_text(message: Message) -> str:
    reasoning = next((message[name] for name in REASONING_FIELDS if message.get(name)), "")
    return reasoning.strip() if isinstance(reasoning, str) else ""


def tool_calls(message: Message) -> Sequence[Any]:
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list | tuple) else ()


def called_function(call: Any) -> Mapping[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    return function if isinstance(function, Mapping) else {}


def call_name(call: Any) -> str:
    return str(called_function(call).get("name", ""))


def call_arguments(call: Any) -> Any:
    """As they were sent: a string of JSON or a value."""
    return called_function(call).get("arguments", "")


def call_values(message: Message) -> list[list[Any]]:
    """Name and arguments of each call, whatever its id and however its JSON is written."""
    return [
        [call_name(call), _argument_value(call_arguments(call))] for call in tool_calls(message)
    ]


def canonical(value: Any) -> bytes:
    """One form for one value, in ASCII whatever it holds."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _argument_value(arguments: Any) -> Any:
    """A list of the JSON value; an object for what is not JSON, so that it differs from any."""
    if isinstance(arguments, str):
        try:
            arguments = parse(arguments if arguments.strip() else "{}")
        except ValueError:
            return {"text": arguments}
    return [_with_whole_numbers(arguments)]


def _with_whole_numbers(value: Any) -> Any:
    """JSON has one kind of number: JavaScript sends 1.0 back as 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {name: _with_whole_numbers(each) for name, each in value.items()}
    return [_with_whole_numbers(each) for each in value] if isinstance(value, list) else value
