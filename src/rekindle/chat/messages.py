"""Accessors of chat messages, whatever form a client sends them in.

OpenAI lets content be a string, a list of parts or nothing, reasoning has several field names, and
the arguments of tool calls are JSON in a string.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from rekindle.chat.tools.values import clean
from rekindle.protocol.nesting import depth_exceeds

Message = Mapping[str, Any]

DEVELOPER = "developer"
SYSTEM_ROLES = ("system", DEVELOPER)
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")  # first match wins

ARGUMENT_DEPTH_LIMIT = 50  # deeper arguments stay strings
SURROGATE_ESCAPE = "\\ud"  # how the escape of a surrogate begins


def content_text(content: Any, separator: str = "\n") -> str:
    """The text of a message's content: a string, or the joined text parts of a list."""
    if isinstance(content, list):
        texts = (part.get("text") for part in content if isinstance(part, Mapping))
        return separator.join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else ""


def with_text_after(message: Message, text: str) -> Message:
    """The message with more text at the end of its own."""
    return {**message, "content": content_text(message.get("content")) + text}


def reasoning(message: Message) -> Any:
    """The first reasoning field that is not empty, as it was sent; None when there is none."""
    return next((message[name] for name in REASONING_FIELDS if message.get(name)), None)


def reasoning_text(message: Message) -> str:
    text = reasoning(message)
    return text.strip() if isinstance(text, str) else ""


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


def dump_json(value: Any) -> str:
    """JSON as models write it."""
    return json.dumps(value, ensure_ascii=False)


def parse_json(text: str) -> Any:
    """A JSON value that comes out of its text and back the same; ValueError for anything else."""
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    if depth_exceeds(value, ARGUMENT_DEPTH_LIMIT):
        raise ValueError("it is nested too deep")
    return _without_surrogates(value) if SURROGATE_ESCAPE in text.lower() else value


def as_object(arguments: Any) -> Any:
    """The object that a string holds, which is empty for an empty string; otherwise unchanged."""
    if not isinstance(arguments, str):
        return arguments
    if not arguments.strip():
        return {}
    try:
        value = parse_json(arguments)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


def with_parsed_arguments(message: Message) -> Message:
    """The message with the arguments of its calls as objects; what is no JSON object stays.

    To be done before the text of control tokens is escaped: JSON may spell it with escapes.
    """
    return with_arguments(message, as_object)


def with_arguments(message: Message, convert: Callable[[Any], Any]) -> Message:
    """The message with the arguments of each of its calls converted."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list | tuple):
        return message
    return {**message, "tool_calls": [_converted(call, convert) for call in calls]}


def _converted(call: Any, convert: Callable[[Any], Any]) -> Any:
    function = called_function(call)
    if "arguments" not in function:
        return call
    return {**call, "function": {**function, "arguments": convert(function["arguments"])}}


def _argument_value(arguments: Any) -> Any:
    """A list of the JSON value; an object for what is not JSON, so that it differs from any."""
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments if arguments.strip() else "{}")
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


def _without_surrogates(value: Any) -> Any:
    """The value with lone surrogates replaced: no prompt can hold one."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {clean(name): _without_surrogates(each) for name, each in value.items()}
    return [_without_surrogates(each) for each in value] if isinstance(value, list) else value


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number is too large")
    return number
