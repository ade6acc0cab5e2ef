"""What templates require of tools and calls beyond what OpenAI's clients send.

gpt-oss's fails for a function without a description, Mistral's for an id of other than nine
letters, Llama's for two calls in one message; gpt-oss's leaves the second one out; Gemma's shows
the name of the function that a result came from.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from blake3 import blake3

from rekindle.chat.capabilities.forms import USER, Render, Tools, attempt, calling, result
from rekindle.chat.messages import Message, call_name, tool_calls

_CALLS = (("needle_one", "call_needle_1"), ("needle_two", "call_needle_2"))  # names and ids
_ID_CHARACTERS = 9
_SHORT_ID = re.compile(f"[a-zA-Z0-9]{{{_ID_CHARACTERS}}}")
#: Functions with as little in them as a client may send.
_MINIMAL_TOOLS = (
    {"type": "function", "function": {"name": "f"}},
    {
        "type": "function",
        "function": {"name": "g", "parameters": {"type": "object", "properties": {"what": {}}}},
    },
)


class ToolDetail(IntEnum):
    """What every function is given at least; each level includes those before it."""

    AS_SENT = 0
    DESCRIPTION = 1
    PARAMETERS = 2
    PARAMETER_DESCRIPTIONS = 3


@dataclass(frozen=True, slots=True)
class ToolRequirements:
    """What has to be added for a template to render at all, and nothing where it does."""

    detail: ToolDetail = ToolDetail.AS_SENT
    short_ids: bool = False
    one_call: bool = False  # in a message

    def adapt(
        self, messages: Sequence[Message], tools: Tools | None
    ) -> tuple[list[Message], list[Any] | None]:
        """The conversation and its tools as the template takes them."""
        adapted = _with_result_names(messages)
        adapted = list(_one_call_each(adapted)) if self.one_call else adapted
        if self.short_ids:
            adapted = [_with_short_ids(message) for message in adapted]
        return adapted, [_with_detail(tool, self.detail) for tool in tools] if tools else None


NONE = ToolRequirements()


def probe(render: Render) -> ToolRequirements:
    """What `render` fails without; nothing where it fails whatever is done."""
    tools = [_with_detail(tool, max(ToolDetail)) for tool in _MINIMAL_TOOLS]

    def shows(requirements: ToolRequirements, *calls: tuple[str, str]) -> bool:
        made = calling(*((name, id, {"what": "x"}) for name, id in calls))
        messages = [USER, made, *(result(id) for _, id in calls)]
        text = attempt(render, requirements.adapt(messages, None)[0], tools)
        return text is not None and all(name in text for name, _ in calls)

    one, two = _CALLS
    short_ids = not shows(NONE, one) and shows(ToolRequirements(short_ids=True), one)
    together = ToolRequirements(short_ids=short_ids)
    one_by_one = ToolRequirements(short_ids=short_ids, one_call=True)
    one_call = not shows(together, one, two) and shows(one_by_one, one, two)
    return ToolRequirements(_least_detail(render), short_ids, one_call)


def _least_detail(render: Render) -> ToolDetail:
    for detail in ToolDetail:
        if attempt(render, *ToolRequirements(detail).adapt([USER], _MINIMAL_TOOLS)) is not None:
            return detail
    return ToolDetail.AS_SENT


def _with_result_names(messages: Sequence[Message]) -> list[Message]:
    """Each result with the name of the function it came from, which some templates show and
    OpenAI's clients leave out."""
    names: dict[Any, Any] = {}
    named: list[Message] = []
    for message in messages:
        for call in tool_calls(message):
            names[call.get("id")] = call_name(call)
        name = names.get(message.get("tool_call_id")) if message.get("role") == "tool" else None
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
            properties = {name: _described(each) for name, each in properties.items()}
        filled["parameters"] = {"type": "object", **parameters, "properties": properties}
    return {**tool, "function": filled}


def _described(schema: Any) -> Any:
    return {"description": "", **schema} if isinstance(schema, Mapping) else schema


def _with_short_ids(message: Message) -> Message:
    adapted = dict(message)
    if calls := tool_calls(message):
        adapted["tool_calls"] = [{**call, "id": _short_id(call.get("id"))} for call in calls]
    if message.get("role") == "tool":
        adapted["tool_call_id"] = _short_id(message.get("tool_call_id"))
    return adapted


def _short_id(id: Any) -> str:
    """The same for the same id, here and in every later request."""
    text = id if isinstance(id, str) else ""
    if _SHORT_ID.fullmatch(text):
        return text
    return blake3(text.encode(errors="surrogatepass")).hexdigest()[:_ID_CHARACTERS]


def _one_call_each(messages: Sequence[Message]) -> Iterator[Message]:
    """Each call in a message of its own, and its result right after it."""
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        calls = tool_calls(message)
        if len(calls) < 2:
            yield message
            continue
        results = []
        while at < len(messages) and messages[at].get("role") == "tool":
            results.append(messages[at])
            at += 1
        yield from _split(message, calls, results)


def _split(message: Message, calls: Sequence[Any], results: list[Message]) -> Iterator[Message]:
    """Text and reasoning stay with the first call; results of no known call follow the last."""
    bare = {"role": message.get("role"), "content": ""}
    for number, call in enumerate(calls):
        yield {**(bare if number else message), "tool_calls": [call]}
        is_last = number == len(calls) - 1
        own = [each for each in results if is_last or each.get("tool_call_id") == call.get("id")]
        results = [each for each in results if each not in own]
        yield from own
