"""The forms of message content, and which of them a template renders.

OpenAI lets content be a string, a list of parts or nothing; most templates were written for one
of the three.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rekindle.chat.messages import Message, as_object, content_text, dump_json, with_arguments
from rekindle.errors import TemplateFailed

# ----------------------------------------------------------------------
# Trying out what a template renders: templates do not declare it.

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


_PRINTED_NONE = ("None", "null")  # as Python and as JSON prints it
_CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {}}}


@dataclass(frozen=True, slots=True)
class ContentForms:
    """What a template takes as content: a string, a list of parts, None in a reply."""

    text: bool
    parts: bool
    none: bool

    def adapt(self, message: Message) -> Message:
        """The same message with its content in a form the template takes."""
        content = message.get("content")
        if content is None and message.get("role") == "assistant":
            return {**message, "content": None if self.none else ""}
        if isinstance(content, str) and self.parts and not self.text:
            return {**message, "content": [{"type": "text", "text": content}]}
        # Templates iterate over the parts of user messages, but print a tool's result as it is.
        is_result = self.text and message.get("role") == "tool"
        if isinstance(content, list) and (is_result or not self.parts):
            return {**message, "content": text_only(content)}
        return message


def probe_content(render: Render) -> ContentForms:
    """Which forms `render` takes."""
    return ContentForms(
        text=shows_needle(attempt(render, [_user(NEEDLE)])),
        parts=shows_needle(attempt(render, [_user([{"type": "text", "text": NEEDLE}])])),
        none=_takes_none(render) and _takes_none(render, tool_calls=[_CALL]),
    )


def text_only(content: Any) -> str:
    """Content as one text; TemplateFailed for a part that is not text, rather than losing it."""
    if isinstance(content, list):
        for part in content:
            _check_text(part)
        return content_text(content)
    return "" if content is None else str(content)


def _takes_none(render: Render, **fields: Any) -> bool:
    """Whether None does no worse than "": a template may refuse the conversation either way."""

    def rendered(content: str | None) -> str | None:
        reply = {"role": "assistant", "content": content, **fields}
        return attempt(render, [_user(NEEDLE), reply])

    empty, none = rendered(""), rendered(None)
    if empty is None:
        return True
    return none is not None and all(none.count(each) == empty.count(each) for each in _PRINTED_NONE)


def _user(content: Any) -> Message:
    return {"role": "user", "content": content}


def _check_text(part: Any) -> None:
    match part:
        case {"type": "text", "text": str()}:
            return
        case {"type": str(kind)}:
            raise TemplateFailed(
                f"This model's chat template takes text only, not content of type '{kind}'."
            )
    raise TemplateFailed("A part of a message's content needs a type and, as text, a text.")


# ----------------------------------------------------------------------
# The form in which a template takes the arguments of calls: objects, or strings of JSON.

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


def probe_arguments(render: Render) -> ArgumentForms:
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
