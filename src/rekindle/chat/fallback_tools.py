"""What templates leave out about tools: told in a system message, called and answered in text.

The form is the one that Hermes models were trained on and many others have seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rekindle.chat.arguments import OBJECTS, PROBE_NAME, dump
from rekindle.chat.content import NEEDLE, Message, joined, shows
from rekindle.errors import TemplateFailed

RenderTools = Callable[[Sequence[Message], Sequence[Any] | None], str]

TOOL = {
    "type": "function",
    "function": {
        "name": PROBE_NAME,
        "description": "Find something.",
        "parameters": {
            "type": "object",
            "properties": {"what": {"type": "string", "description": "What to find."}},
        },
    },
}
CALL_NAME = "needle_call"  # another one: the tool's is told anyway
CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": CALL_NAME, "arguments": {"what": "x"}},
}
CALL_BEGIN, CALL_END = "<tool_call>\n", "\n</tool_call>"
RESULT_BEGIN, RESULT_END = "<tool_response>\n", "\n</tool_response>"
TOLD = """\
You can call functions to help you with a request. These there are, each as JSON:
<tools>
{tools}
</tools>

To call one, write its name and its arguments as JSON, like this, once for each call:
<tool_call>
{{"name": "<its name>", "arguments": {{<its arguments>}}}}
</tool_call>

What it returns will be given to you between <tool_response> and </tool_response>."""


@dataclass(frozen=True, slots=True)
class Toolless:
    """What a template does not say, and how to say it in its place."""

    tools: bool  # it tells of tools itself; then it has its own way with results, too
    calls: bool  # it shows the calls of earlier replies
    system: bool  # it takes system messages
    results: bool  # it takes messages of the role "tool", and shows them

    def write(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> list[Message]:
        """The conversation with what the template leaves out written in messages."""
        written = list(messages)
        if not (self.tools and self.calls):
            written = [_with_calls_said(message) for message in written]
        if self.tools:
            return written
        written = list(self._with_results(written))
        return self._with_tools(written, tools) if tools else written

    def _with_results(self, messages: Sequence[Message]) -> Iterator[Message]:
        if self.results:
            yield from (
                _result(message) if _is_result(message) else message for message in messages
            )
            return
        # Results side by side are one message, with what the user adds: users and replies take
        # turns in most of these templates.
        for heard, group in groupby(messages, lambda each: _is_result(each) or _is_user(each)):
            run = list(group)
            if not heard or not any(map(_is_result, run)):
                yield from run
                continue
            texts = [_wrapped(each) if _is_result(each) else _text(each) for each in run]
            yield {"role": "user", "content": "\n".join(texts)}

    def _with_tools(self, messages: list[Message], tools: Sequence[Any]) -> list[Message]:
        told = TOLD.format(tools="\n".join(map(dump, tools)))
        if self.system:
            if messages and messages[0].get("role") in ("system", "developer"):
                first = {**messages[0], "content": f"{_text(messages[0])}\n\n{told}"}
                return [first, *messages[1:]]
            return [{"role": "system", "content": told}, *messages]
        for at, message in enumerate(messages):
            if _is_user(message):
                first = {**message, "content": f"{told}\n\n{_text(message)}"}
                return [*messages[:at], first, *messages[at + 1 :]]
        return [{"role": "user", "content": told}, *messages]


def probe(render: RenderTools) -> Toolless:
    """What comes through `render`."""

    def attempt(tools: Sequence[Any] | None, *messages: Message) -> str | None:
        try:
            return render(messages, tools)
        except TemplateFailed:
            return None

    system, user = {"role": "system", "content": NEEDLE}, {"role": "user", "content": "?"}
    result = {"role": "tool", "content": NEEDLE, "tool_call_id": "call00001"}
    said = {"role": "assistant", "content": "!"}
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    told = [attempt([TOOL], *talk) or "" for talk in ((user,), (system, user))]
    shown = [attempt([TOOL], *talk) for talk in ((user, called), (user, called, result))]
    return Toolless(
        tools=any(PROBE_NAME in each for each in told),
        calls=any(each is None or CALL_NAME in each for each in shown),
        system=shows(attempt(None, system, user)),
        results=shows(attempt(None, user, said, result)),
    )


def uses_tools(message: Message) -> bool:
    return bool(message.get("tool_calls")) or _is_result(message)


def _is_result(message: Message) -> bool:
    return message.get("role") == "tool"


def _is_user(message: Message) -> bool:
    return message.get("role") == "user"


def _with_calls_said(message: Message) -> Message:
    calls = OBJECTS.fit(message).get("tool_calls")
    if not calls:
        return message
    said = [_text(message)] if message.get("content") else []
    said += [CALL_BEGIN + dump(_call(call)) + CALL_END for call in calls]
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": "\n".join(said)}


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise TemplateFailed("A tool call needs a function with a name and arguments.")
    return {"name": function.get("name"), "arguments": function.get("arguments")}


def _result(message: Message) -> Message:
    return {**message, "content": _wrapped(message)}


def _wrapped(message: Message) -> str:
    return RESULT_BEGIN + _text(message) + RESULT_END


def _text(message: Message) -> str:
    return joined(message.get("content"))
