"""Tools for models whose template shows none: described, called and answered in plain messages.

The form is the one that Hermes models were trained on and many others have seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rekindle.chat.capabilities.forms import (
    NEEDLE,
    OBJECTS,
    PROBE_TOOL,
    TOOL,
    USER,
    Render,
    Tools,
    attempt,
    calling,
    result,
    shows_needle,
    text_only,
)
from rekindle.chat.messages import SYSTEM_ROLES, Message, dump_json
from rekindle.errors import TemplateFailed

_CALL = ("needle_call", "call00001", {"what": "x"})  # not the tool's name, which is shown anyway
_CALL_BEGIN, _CALL_END = "<tool_call>\n", "\n</tool_call>"
_RESULT_BEGIN, _RESULT_END = "<tool_response>\n", "\n</tool_response>"
INSTRUCTIONS = """\
You have access to functions that help you answer the user. These are the available functions, \
each described by a JSON object:
<tools>
{tools}
</tools>

To call a function, reply with a JSON object that contains the function's name and its arguments, \
inside <tool_call></tool_call> tags:
<tool_call>
{{"name": "<function name>", "arguments": {{<arguments as JSON>}}}}
</tool_call>

To make several calls, write one <tool_call> block for each of them. The result of each call will \
be given to you inside <tool_response></tool_response> tags."""


@dataclass(frozen=True, slots=True)
class ToolFallback:
    """What a template shows of tools and calls; what it does not is written into messages."""

    shows_tools: bool  # then it renders results in a way of its own, too
    shows_calls: bool  # of earlier replies
    takes_system: bool
    shows_results: bool  # messages of the role "tool"

    def write(self, messages: Sequence[Message], tools: Tools | None) -> list[Message]:
        """The conversation with what the template leaves out written into its messages."""
        written = list(messages)
        if not (self.shows_tools and self.shows_calls):
            written = [_with_calls_as_text(message) for message in written]
        if self.shows_tools:
            return written
        written = list(self._with_results(written))
        return self._with_tools(written, tools) if tools else written

    def _with_results(self, messages: Sequence[Message]) -> Iterator[Message]:
        if self.shows_results:
            for message in messages:
                is_result = _is_result(message)
                yield {**message, "content": _result_text(message)} if is_result else message
            return
        # Neighbouring results and user messages become one user message: most of these templates
        # require users and replies to alternate.
        for is_input, group in groupby(messages, lambda each: _is_result(each) or _is_user(each)):
            run = list(group)
            if not is_input or not any(map(_is_result, run)):
                yield from run
                continue
            texts = [_result_text(each) if _is_result(each) else _text(each) for each in run]
            yield {"role": "user", "content": "\n".join(texts)}

    def _with_tools(self, messages: list[Message], tools: Tools) -> list[Message]:
        instructions = INSTRUCTIONS.format(tools="\n".join(map(dump_json, tools)))
        if self.takes_system:
            if messages and messages[0].get("role") in SYSTEM_ROLES:
                # Before its text: agents write what changes with each session into it.
                first = {**messages[0], "content": f"{instructions}\n\n{_text(messages[0])}"}
                return [first, *messages[1:]]
            return [{"role": "system", "content": instructions}, *messages]
        for at, message in enumerate(messages):
            if _is_user(message):
                first = {**message, "content": f"{instructions}\n\n{_text(message)}"}
                return [*messages[:at], first, *messages[at + 1 :]]
        return [{"role": "user", "content": instructions}, *messages]


def probe(render: Render) -> ToolFallback:
    """What `render` shows."""
    system = {"role": "system", "content": NEEDLE}
    reply = {"role": "assistant", "content": "!"}
    call, answer = calling(_CALL), result(_CALL[1], NEEDLE)
    with_tools = [attempt(render, each, [TOOL]) or "" for each in ([USER], [system, USER])]
    with_calls = [attempt(render, each, [TOOL]) for each in ([USER, call], [USER, call, answer])]
    return ToolFallback(
        shows_tools=any(PROBE_TOOL in text for text in with_tools),
        shows_calls=any(text is None or _CALL[0] in text for text in with_calls),
        takes_system=shows_needle(attempt(render, [system, USER])),
        shows_results=shows_needle(attempt(render, [USER, reply, answer])),
    )


def uses_tools(message: Message) -> bool:
    return bool(message.get("tool_calls")) or _is_result(message)


def _is_result(message: Message) -> bool:
    return message.get("role") == "tool"


def _is_user(message: Message) -> bool:
    return message.get("role") == "user"


def _with_calls_as_text(message: Message) -> Message:
    calls = OBJECTS.adapt(message).get("tool_calls")
    if not calls:
        return message
    texts = [_text(message)] if message.get("content") else []
    texts += [_CALL_BEGIN + dump_json(_function(call)) + _CALL_END for call in calls]
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": "\n".join(texts)}


def _function(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise TemplateFailed("A tool call needs a function with a name and arguments.")
    return {"name": function.get("name"), "arguments": function.get("arguments")}


def _result_text(message: Message) -> str:
    return _RESULT_BEGIN + _text(message) + _RESULT_END


def _text(message: Message) -> str:
    return text_only(message.get("content"))
