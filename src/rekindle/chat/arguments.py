"""The arguments of tool calls in a history, which OpenAI's clients send as JSON in a string."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from rekindle.chat.content import Message
from rekindle.chat.tools.json_value import clean
from rekindle.protocol.nesting import depth_exceeds

DEPTH_LIMIT = 50  # deeper arguments stay strings
HALF_CHARACTER = "\\ud"  # the beginning of an escape of half a character


def parse(text: str) -> Any:
    """A JSON value that comes out of its text and back the same; ValueError for anything else."""
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    if depth_exceeds(value, DEPTH_LIMIT):
        raise ValueError("it is nested too deep")
    return _with_whole_characters(value) if HALF_CHARACTER in text.lower() else value


def parsed(message: Message) -> Message:
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


def as_object(arguments: Any) -> Any:
    """The object that a string holds, which is empty for an empty string; otherwise unchanged."""
    if not isinstance(arguments, str):
        return arguments
    if not arguments.strip():
        return {}
    try:
        value = parse(arguments)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


def dump(value: Any) -> str:
    """JSON as models write it."""
    return json.dumps(value, ensure_ascii=False)


def _converted(call: Any, convert: Callable[[Any], Any]) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "arguments" not in function:
        return call
    return {**call, "function": {**function, "arguments": convert(function["arguments"])}}


def _with_whole_characters(value: Any) -> Any:
    """The value with halves of characters replaced: no prompt can hold one."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {clean(name): _with_whole_characters(each) for name, each in value.items()}
    return [_with_whole_characters(each) for each in value] if isinstance(value, list) else value


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number is too large")
    return number
