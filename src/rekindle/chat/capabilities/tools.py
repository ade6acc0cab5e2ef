"""Adapts tools, calls and results to what a template can render.

Some templates require more than OpenAI's clients send. gpt-oss needs a description of each function
and omits a second call. Mistral needs ids of nine letters. Llama fails for two calls in a message.
Gemma shows the name of the function that a result came from.

A template may not show tools at all. Then the tools, calls and results are written into plain
messages, in the form of the Hermes models, which many other models have seen too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from blake3 import blake3

from rekindle.chat.capabilities.messages import (
    NEEDLE,
    PROBE_ID,
    PROBE_TOOL,
    TOOL,
    ArgumentForms,
    Render,
    Tools,
    attempt,
    calling,
    merged,
    result,
    shows_needle,
    user,
)
from rekindle.chat.messages import (
    Message,
    call_name,
    called_function,
    dump_json,
    is_result,
    is_system,
    text_only,
    tool_calls,
)
from rekindle.errors import TemplateFailed

ID_CHARACTERS = 9
_SHORT_ID = re.compile(f"[a-zA-Z0-9]{{{ID_CHARACTERS}}}")
# Functions with as few fields as a client may send.
_MINIMAL_TOOLS = (
    {"type": "function", "function": {"name": "f"}},
    {
        "type": "function",
        "function": {"name": "g", "parameters": {"type": "object", "properties": {"what": {}}}},
    },
)
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


class ToolDetail(IntEnum):
    """The fields that every function gets. Each level includes those before it."""

    AS_SENT = 0
    DESCRIPTION = 1
    PARAMETERS = 2
    PARAMETER_DESCRIPTIONS = 3


@dataclass(frozen=True, slots=True)
class ToolRequirements:
    detail: ToolDetail = ToolDetail.AS_SENT
    short_ids: bool = False
    one_call: bool = False  # at most one call in a message

    @classmethod
    def probe(cls, render: Render) -> ToolRequirements:
        """No additions if the template fails with them, too."""
        tools = [_with_detail(tool, max(ToolDetail)) for tool in _MINIMAL_TOOLS]

        def shows(requirements: ToolRequirements, *calls: tuple[str, str]) -> bool:
            made = calling(*((name, id, {"what": "x"}) for name, id in calls))
            messages = [user(), made, *(result(id) for _, id in calls)]
            text = attempt(render, requirements.adapt(messages, None)[0], tools)
            return text is not None and all(name in text for name, _ in calls)

        one, two = ("needle_one", "call_needle_1"), ("needle_two", "call_needle_2")
        short_ids = not shows(cls(), one) and shows(cls(short_ids=True), one)
        together, one_by_one = cls(short_ids=short_ids), cls(short_ids=short_ids, one_call=True)
        one_call = not shows(together, one, two) and shows(one_by_one, one, two)
        enough = (
            detail
            for detail in ToolDetail
            if attempt(render, *cls(detail).adapt([user()], _MINIMAL_TOOLS)) is not None
        )
        return cls(next(enough, ToolDetail.AS_SENT), short_ids, one_call)

    def adapt(
        self, messages: Sequence[Message], tools: Tools | None
    ) -> tuple[list[Message], list[Any] | None]:
        adapted = _with_result_names(messages)
        adapted = list(_one_call_each(adapted)) if self.one_call else adapted
        if self.short_ids:
            adapted = [_with_short_ids(message) for message in adapted]
        return adapted, [_with_detail(tool, self.detail) for tool in tools] if tools else None


def _with_result_names(messages: Sequence[Message]) -> list[Message]:
    """Adds the function's name to each result. OpenAI's clients send only the call's id."""
    names: dict[Any, Any] = {}
    named: list[Message] = []
    for message in messages:
        for call in tool_calls(message):
            names[call.get("id")] = call_name(call)
        name = names.get(message.get("tool_call_id")) if is_result(message) else None
        named.append({**message, "name": name} if name and not message.get("name") else message)
    return named


def _with_detail(tool: Any, detail: ToolDetail) -> Any:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if detail is ToolDetail.AS_SENT or not isinstance(function, Mapping):
        return tool
    rest = {name: value for name, value in function.items() if name != "name"}
    filled = {"name": function.get("name", ""), "description": "", **rest}
    if detail >= ToolDetail.PARAMETERS:
        parameters = filled.get("parameters") or {}
        properties = parameters.get("properties") or {}
        if detail >= ToolDetail.PARAMETER_DESCRIPTIONS:
            properties = {
                name: {"description": "", **each} if isinstance(each, Mapping) else each
                for name, each in properties.items()
            }
        filled["parameters"] = {"type": "object", **parameters, "properties": properties}
    return {**tool, "function": filled}


def _with_short_ids(message: Message) -> Message:
    adapted = dict(message)
    if calls := tool_calls(message):
        adapted["tool_calls"] = [{**call, "id": _short_id(call.get("id"))} for call in calls]
    if is_result(message):
        adapted["tool_call_id"] = _short_id(message.get("tool_call_id"))
    return adapted


def _short_id(id: Any) -> str:
    """A short id that is the same for the same id in every request."""
    text = id if isinstance(id, str) else ""
    if _SHORT_ID.fullmatch(text):
        return text
    return blake3(text.encode(errors="surrogatepass")).hexdigest()[:ID_CHARACTERS]


def _one_call_each(messages: Sequence[Message]) -> Iterator[Message]:
    """Each call in a message of its own, directly followed by its result."""
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        calls = tool_calls(message)
        if len(calls) < 2:
            yield message
            continue
        results = []
        while at < len(messages) and is_result(messages[at]):
            results.append(messages[at])
            at += 1
        # Text and reasoning stay with the first call. Results of unknown calls follow the last.
        bare = {"role": message.get("role"), "content": ""}
        for number, call in enumerate(calls):
            yield {**(bare if number else message), "tool_calls": [call]}
            is_last, id = number == len(calls) - 1, call.get("id")
            own = [each for each in results if is_last or each.get("tool_call_id") == id]
            results = [each for each in results if each not in own]
            yield from own


@dataclass(frozen=True, slots=True)
class ToolFallback:
    """What a template shows of tools and calls. The rest is written into messages."""

    shows_tools: bool  # such a template also renders results in its own way
    shows_calls: bool  # in earlier replies
    takes_system: bool
    shows_results: bool  # messages of the role "tool"

    @classmethod
    def probe(cls, render: Render) -> ToolFallback:
        system = {"role": "system", "content": NEEDLE}
        name = "needle_call"  # not the name of the tool, which the template shows anyway
        call, answer = calling((name, PROBE_ID, {"what": "x"})), result(PROBE_ID, NEEDLE)
        with_tools = [attempt(render, each, [TOOL]) or "" for each in ([user()], [system, user()])]
        called = ([user(), call], [user(), call, answer])
        with_calls = [attempt(render, each, [TOOL]) for each in called]
        reply = {"role": "assistant", "content": "!"}
        return cls(
            shows_tools=any(PROBE_TOOL in text for text in with_tools),
            shows_calls=any(text is None or name in text for text in with_calls),
            takes_system=shows_needle(attempt(render, [system, user()])),
            shows_results=shows_needle(attempt(render, [user(), reply, answer])),
        )

    def adapt(self, messages: Sequence[Message], tools: Tools | None) -> Sequence[Message]:
        """The conversation with everything in its messages that the template would omit."""
        if not (self.shows_tools and self.shows_calls):
            messages = [_with_calls_as_text(message) for message in messages]
        if self.shows_tools:
            return messages
        if self.shows_results:
            messages = [
                {**each, "content": _input_text(each)} if is_result(each) else each
                for each in messages
            ]
        else:
            # Most of these templates require users and replies to alternate.
            messages = merged(messages, is_result, lambda run: "\n".join(map(_input_text, run)))
        return self._with_tools(messages, tools) if tools else messages

    def _with_tools(self, messages: Sequence[Message], tools: Tools) -> list[Message]:
        instructions = INSTRUCTIONS.format(tools="\n".join(map(dump_json, tools)))
        if self.takes_system:
            at = 0 if messages and is_system(messages[0]) else None
        else:
            users = (at for at, each in enumerate(messages) if each.get("role") == "user")
            at = next(users, None)
        if at is None:
            role = "system" if self.takes_system else "user"
            return [{"role": role, "content": instructions}, *messages]
        # The instructions come first, because agents put text that varies by session after them.
        text = f"{instructions}\n\n{text_only(messages[at].get('content'))}"
        return [*messages[:at], {**messages[at], "content": text}, *messages[at + 1 :]]


def _with_calls_as_text(message: Message) -> Message:
    calls = ArgumentForms(objects=True).adapt(message).get("tool_calls")
    if not calls:
        return message
    texts = [text_only(message["content"])] if message.get("content") else []
    for function in map(called_function, calls):
        if not function:
            raise TemplateFailed("A tool call needs a function with a name and arguments.")
        call = {name: function.get(name) for name in ("name", "arguments")}
        texts.append(f"<tool_call>\n{dump_json(call)}\n</tool_call>")
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": "\n".join(texts)}


def _input_text(message: Message) -> str:
    text = text_only(message.get("content"))
    return f"<tool_response>\n{text}\n</tool_response>" if is_result(message) else text
