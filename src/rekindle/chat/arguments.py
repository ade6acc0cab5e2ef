"""The arguments of calls in a history: a string of JSON to OpenAI, an object to most templates."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from rekindle.chat.content import Message, Render
from rekindle.chat.tools.json_value import clean
from rekindle.errors import TemplateFailed

Form = Callable[[Any], Any]

AS_PYTHON = "{'key'"  # a printed dictionary, not JSON
PROBE_NAME = "needle_tool"
DEPTH_LIMIT = 50  # deeper ones stay strings, and messages as deep as they came
ESCAPE = re.compile(r"\\(.)", re.DOTALL)
HALF = "\\ud"  # an escape of half a character begins so
HARMLESS = frozenset('nrt"\\')  # escapes that no control token's text is made of


def parse(text: str) -> Any:
    """A JSON value that comes out of its text and back the same; ValueError for anything else."""
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    if _depth(value) > DEPTH_LIMIT:
        raise ValueError("it is nested too deep")
    return _whole(value) if HALF in text.lower() else value


def parsed(message: Message) -> Message:
    """The message with the arguments of its calls as objects; what is no JSON object stays.

    To be done before control tokens' text is quoted: JSON may spell that with escapes.
    """
    return _with_arguments(message, _object)


@dataclass(frozen=True, slots=True)
class ArgumentForms:
    """What a template takes as the arguments of a call."""

    objects: bool
    strings: bool = True  # beside objects

    def fit(self, message: Message) -> Message:
        """The same message with its calls' arguments in the form the template takes."""
        if not self.objects:
            return _with_arguments(message, _text)
        return _with_arguments(message, _unescaped if self.strings else _wrapped)


OBJECTS = ArgumentForms(objects=True)


def probe(render: Render) -> ArgumentForms:
    """Objects, unless they make the template fail, or come out as Python prints them."""
    objects, strings = (_attempt(render, form) for form in ({"key": "x"}, '{"key": "x"}'))
    if objects is None or AS_PYTHON in objects:
        return ArgumentForms(objects=strings is None)
    return ArgumentForms(objects=True, strings=strings is not None)


def _attempt(render: Render, arguments: Any) -> str | None:
    function = {"name": PROBE_NAME, "arguments": arguments}
    call = {"id": "call00001", "type": "function", "function": function}
    talk: list[Message] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    result = {"role": "tool", "content": "!", "name": PROBE_NAME, "tool_call_id": "call00001"}
    for messages in (talk, [*talk, result]):  # some want to see what came of a call
        with suppress(TemplateFailed):
            return render(messages)
    return None


def dump(value: Any) -> str:
    """JSON as models write it."""
    return json.dumps(value, ensure_ascii=False)


def _with_arguments(message: Message, form: Form) -> Message:
    calls = message.get("tool_calls")
    if not isinstance(calls, list | tuple):
        return message
    return {**message, "tool_calls": [_with_form(call, form) for call in calls]}


def _with_form(call: Any, form: Form) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "arguments" not in function:
        return call
    return {**call, "function": {**function, "arguments": form(function["arguments"])}}


def _object(arguments: Any) -> Any:
    """The object that a text is; a call without arguments has an empty one."""
    if not isinstance(arguments, str):
        return arguments
    if not arguments.strip():
        return {}
    try:
        value = parse(arguments)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


def _unescaped(arguments: Any) -> Any:
    """The object, unless escapes could spell what quoting has not seen."""
    if isinstance(arguments, str) and not HARMLESS.issuperset(ESCAPE.findall(arguments)):
        return arguments
    return _object(arguments)


def _wrapped(arguments: Any) -> Any:
    """An object in any case: what is no JSON object is in one."""
    value = _unescaped(arguments)
    return value if isinstance(value, Mapping) else {"arguments": value}


def _text(arguments: Any) -> Any:
    return dump(arguments) if isinstance(arguments, Mapping) else arguments


def _whole(value: Any) -> Any:
    """The value with halves of characters replaced: no prompt can hold one."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {clean(name): _whole(each) for name, each in value.items()}
    return [_whole(each) for each in value] if isinstance(value, list) else value


def _depth(value: Any) -> int:
    """How deep it is nested, and whether that is too deep; never by recursion without end."""
    level, depth = [value], 0
    while level and depth <= DEPTH_LIMIT:
        depth += 1
        level = [
            item
            for each in level
            if isinstance(each, dict | list)
            for item in (each.values() if isinstance(each, dict) else each)
        ]
    return depth


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number is too large")
    return number
