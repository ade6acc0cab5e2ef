"""The form in which a template takes the arguments of calls: objects, or strings of JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rekindle.chat.capabilities.probe import (
    PROBE_TOOL,
    TOOL,
    USER,
    Render,
    attempt,
    calling,
    result,
)
from rekindle.chat.messages import Message, as_object, dump_json, with_arguments

_PRINTED_DICT = "{'key'"  # as Python prints it, which is not JSON
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_SAFE_ESCAPES = frozenset('nrt"\\')  # they spell no character of a control token's text


@dataclass(frozen=True, slots=True)
class ArgumentForms:
    """What a template takes as the arguments of a call."""

    objects: bool
    strings: bool = True  # beside objects

    def adapt(self, message: Message) -> Message:
        """The same message with its calls' arguments in a form the template takes."""
        if not self.objects:
            return with_arguments(message, _as_string)
        return with_arguments(message, _as_safe_object if self.strings else _as_any_object)


OBJECTS = ArgumentForms(objects=True)


def probe(render: Render) -> ArgumentForms:
    """Objects, unless they make the template fail or come out as Python prints them."""
    objects, strings = (_rendered(render, form) for form in ({"key": "x"}, '{"key": "x"}'))
    if objects is None or _PRINTED_DICT in objects:
        return ArgumentForms(objects=strings is None)
    return ArgumentForms(objects=True, strings=strings is not None)


def _rendered(render: Render, arguments: Any) -> str | None:
    id = "call00001"
    messages = [USER, calling((PROBE_TOOL, id, arguments))]
    text = attempt(render, messages, [TOOL])
    if text is not None:
        return text
    # Some templates take a call only together with its result.
    return attempt(render, [*messages, result(id, name=PROBE_TOOL)], [TOOL])


def _as_safe_object(arguments: Any) -> Any:
    """The object, unless escapes could spell a control token that escaping has not seen."""
    if isinstance(arguments, str) and not _SAFE_ESCAPES.issuperset(_ESCAPE.findall(arguments)):
        return arguments
    return as_object(arguments)


def _as_any_object(arguments: Any) -> Any:
    """An object in any case: what is no JSON object is wrapped in one."""
    value = _as_safe_object(arguments)
    return value if isinstance(value, Mapping) else {"arguments": value}


def _as_string(arguments: Any) -> Any:
    return dump_json(arguments) if isinstance(arguments, Mapping) else arguments
