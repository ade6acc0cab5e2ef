"""Finds out by rendering probes which messages a template accepts, and adapts messages to it.

Templates do not declare what they accept. Content may be a string, a list of parts or absent, and
most templates were written for one of the three.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby, takewhile
from typing import Any

from rekindle.chat.messages import (
    DEVELOPER,
    REASONING_FIELDS,
    Message,
    as_object,
    dump_json,
    is_result,
    is_system,
    reasoning,
    text_only,
    with_arguments,
)
from rekindle.errors import TemplateFailed

Tools = Sequence[Any]
Render = Callable[[Sequence[Message], Tools | None], str]

NEEDLE, PROBE_TOOL, PROBE_ID = "needle", "needle_tool", "call00001"
_SHOWN = re.compile(f"(?<!['\"]){NEEDLE}(?!['\"])")  # in quotes, it is a list printed by Python
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


def attempt(render: Render, messages: Sequence[Message], tools: Tools | None = None) -> str | None:
    """The rendered text, or None if the template fails."""
    try:
        return render(messages, tools)
    except TemplateFailed:
        return None


def shows_needle(rendered: str | None) -> bool:
    return rendered is not None and _SHOWN.search(rendered) is not None


def user(content: Any = "?") -> Message:
    return {"role": "user", "content": content}


def calling(*calls: tuple[str, str, Any]) -> Message:
    """A reply with calls, each given by its name, id and arguments."""
    made = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for name, id, arguments in calls
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


def result(id: str, content: str = "!", **fields: Any) -> Message:
    return {"role": "tool", "content": content, "tool_call_id": id, **fields}


@dataclass(frozen=True, slots=True)
class FieldNames:
    developer_role: bool
    reasoning: str | None  # the field from which it reads the reasoning of a reply

    @classmethod
    def of(cls, source: str) -> FieldNames:
        read = (name for name in REASONING_FIELDS if re.search(rf"""[.'"]{name}\b""", source))
        return cls(developer_role=DEVELOPER in source, reasoning=next(read, None))

    def adapt(self, message: Message) -> Message:
        if message.get("role") == DEVELOPER and not self.developer_role:
            return {**message, "role": "system"}
        sent = reasoning(message)
        if sent is None or self.reasoning is None or self.reasoning in message:
            return message
        if message.get("tool_calls") and message.get("content"):
            return message  # the template of gpt-oss refuses reasoning next to calls and content
        return {**message, self.reasoning: sent}


@dataclass(frozen=True, slots=True)
class ContentForms:
    text: bool
    parts: bool
    none: bool  # whether the content of a reply may be None

    @classmethod
    def probe(cls, render: Render) -> ContentForms:
        call = {"id": PROBE_ID, "type": "function", "function": {"name": "f", "arguments": {}}}
        return cls(
            text=shows_needle(attempt(render, [user(NEEDLE)])),
            parts=shows_needle(attempt(render, [user([{"type": "text", "text": NEEDLE}])])),
            none=_accepts_none(render) and _accepts_none(render, tool_calls=[call]),
        )

    def adapt(self, message: Message) -> Message:
        content = message.get("content")
        if content is None and message.get("role") == "assistant":
            return {**message, "content": None if self.none else ""}
        if isinstance(content, str) and self.parts and not self.text:
            return {**message, "content": [{"type": "text", "text": content}]}
        # Templates that iterate over the parts of user messages still print tool results directly.
        if isinstance(content, list) and (not self.parts or (self.text and is_result(message))):
            return {**message, "content": text_only(content)}
        return message


def _accepts_none(render: Render, **fields: Any) -> bool:
    """Whether None renders like "". The template may refuse the conversation in both cases."""

    def rendered(content: str | None) -> str | None:
        return attempt(render, [user(NEEDLE), {"role": "assistant", "content": content, **fields}])

    empty, none = rendered(""), rendered(None)
    if empty is None:
        return True
    printed = ("None", "null")  # as Python and as JSON prints it
    return none is not None and all(none.count(each) == empty.count(each) for each in printed)


_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_SAFE_ESCAPES = frozenset('nrt"\\')  # they cannot spell the text of a control token


@dataclass(frozen=True, slots=True)
class ArgumentForms:
    """The forms of call arguments that a template accepts: objects, or strings of JSON."""

    objects: bool
    strings: bool = True

    @classmethod
    def probe(cls, render: Render) -> ArgumentForms:
        """Prefers objects, unless the template fails or prints them as Python does."""

        def rendered(arguments: Any) -> str | None:
            messages = [user(), calling((PROBE_TOOL, PROBE_ID, arguments))]
            text = attempt(render, messages, [TOOL])
            if text is not None:
                return text
            # Some templates accept a call only together with its result.
            return attempt(render, [*messages, result(PROBE_ID, name=PROBE_TOOL)], [TOOL])

        objects, strings = rendered({"key": "x"}), rendered('{"key": "x"}')
        if objects is None or "{'key'" in objects:
            return cls(objects=strings is None)
        return cls(objects=True, strings=strings is not None)

    def adapt(self, message: Message) -> Message:
        return with_arguments(message, self._converted)

    def _converted(self, arguments: Any) -> Any:
        if not self.objects:
            return dump_json(arguments) if isinstance(arguments, Mapping) else arguments
        is_safe = not isinstance(arguments, str) or _SAFE_ESCAPES.issuperset(
            _ESCAPE.findall(arguments)
        )
        # Other escapes could spell a control token, which escaping has not seen.
        value = as_object(arguments) if is_safe else arguments
        return value if self.strings or isinstance(value, Mapping) else {"arguments": value}


class SystemForm(Enum):
    """The form of a system message that is not the first message."""

    AS_SENT = "a system message"
    USER = "a user message of its own"
    MERGED = "a part of the adjacent user message"


_FIRST, _REPLY, _LAST = "probe-first", "probe-reply", "probe-last"
_SYSTEM = {"role": "system", "content": NEEDLE}


@dataclass(frozen=True, slots=True)
class SystemMessages:
    """Where a template accepts system messages.

    Agents send system messages in mid-conversation. Some templates render them in place, some omit
    or move them, some fail. A message is never moved to the top, because that would change the
    beginning of the prompt in every turn (docs/decisions/0038-system-messages.md).
    """

    leading: bool  # the template accepts one at the beginning, even if it omits it
    later: SystemForm

    @classmethod
    def probe(cls, render: Render) -> SystemMessages:
        alone, with_system = (
            attempt(render, each) for each in ([user(_LAST)], [_SYSTEM, user(_LAST)])
        )
        leading = with_system is not None or alone is None
        working = (form for form in SystemForm if cls(leading=True, later=form)._works(render))
        return cls(leading, next(working, SystemForm.AS_SENT))

    def _works(self, render: Render) -> bool:
        """Whether `render` shows a message before the last one and one after it in place."""
        begun = [user(_FIRST), {"role": "assistant", "content": _REPLY}]
        before = attempt(render, self.adapt([*begun, _SYSTEM, user(_LAST)])) or ""
        after = attempt(render, self.adapt([*begun, user(_LAST), _SYSTEM])) or ""
        return _in_order(before, _REPLY, NEEDLE, _LAST) and _in_order(after, _REPLY, _LAST, NEEDLE)

    def adapt(self, messages: Sequence[Message]) -> Sequence[Message]:
        if not self.leading:
            return merged(messages, is_system, _joined)
        if self.later is SystemForm.AS_SENT or not any(map(is_system, messages[1:])):
            return messages
        first, rest = _split(messages)
        if self.later is SystemForm.MERGED:
            return [*first, *merged(rest, is_system, _joined)]
        return [*first, *({**each, "role": "user"} if is_system(each) else each for each in rest)]


def _in_order(text: str, *words: str) -> bool:
    places = [text.find(word) for word in words]
    return places[0] >= 0 and places == sorted(places)


def _split(messages: Sequence[Message]) -> tuple[Sequence[Message], Sequence[Message]]:
    """The system messages at the beginning as one, and the rest."""
    first = list(takewhile(is_system, messages))
    rest = messages[len(first) :]
    return [{**first[0], "content": _joined(first)}] if len(first) > 1 else first, rest


def merged(
    messages: Sequence[Message],
    is_special: Callable[[Message], bool],
    text: Callable[[Sequence[Message]], str],
) -> list[Message]:
    """Merge special messages and the user messages next to them into one user message."""
    found: list[Message] = []
    for _, group in groupby(messages, lambda m: is_special(m) or m.get("role") == "user"):
        run = list(group)
        found += [user(text(run))] if any(map(is_special, run)) else run
    return found


def _joined(messages: Sequence[Message]) -> str:
    return "\n\n".join(text_only(each.get("content")) for each in messages)
