"""What templates demand of tools and calls beyond what OpenAI's clients send.

gpt-oss's fails for a function without a description, Mistral's for an id of other than nine
letters, Llama's for two calls in one message; gpt-oss's leaves the second one out; Gemma's shows
the name of the function that a result came from.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from rekindle.chat.content import Message
from rekindle.errors import TemplateFailed

RenderTools = Callable[[Sequence[Message], Sequence[Any] | None], str]

CALLS = (("needle_one", "call_needle_1"), ("needle_two", "call_needle_2"))  # names and ids
ID_CHARACTERS = 9
SHORT_ID = re.compile(f"[a-zA-Z0-9]{{{ID_CHARACTERS}}}")
#: Functions that say as little as a client may.
TERSE = (
    {"type": "function", "function": {"name": "f"}},
    {
        "type": "function",
        "function": {
            "name": "g",
            "parameters": {"type": "object", "properties": {"what": {}}},
        },
    },
)
MOST_TOLD = 3  # of what a function may say: its description, its parameters, theirs


@dataclass(frozen=True, slots=True)
class Demands:
    """What has to be added for a template to render at all, and nothing where it does."""

    told: int = 0  # how much a function has to say of itself, up to MOST_TOLD
    short_ids: bool = False
    one_call: bool = False  # in a message

    def fit(
        self, messages: Sequence[Message], tools: Sequence[Any] | None
    ) -> tuple[list[Message], list[Any] | None]:
        """The conversation and its tools as the template takes them."""
        fitting = _naming_results(messages)
        fitting = list(_one_by_one(fitting)) if self.one_call else fitting
        if self.short_ids:
            fitting = [_with_short_ids(message) for message in fitting]
        return fitting, [_telling(tool, self.told) for tool in tools] if tools else None


NONE = Demands()


def probe(render: RenderTools) -> Demands:
    """What `render` fails without; nothing where it fails whatever is done."""

    def attempt(messages: Sequence[Message], tools: Sequence[Any] | None) -> str | None:
        try:
            return render(messages, tools)
        except TemplateFailed:
            return None

    user = {"role": "user", "content": "?"}
    ways = (Demands(told=told) for told in range(MOST_TOLD + 1))
    told = next((way for way in ways if attempt(*way.fit([user], TERSE)) is not None), NONE).told
    tools = [_telling(tool, MOST_TOLD) for tool in TERSE]

    def shown(demands: Demands, *calls: tuple[str, str]) -> bool:
        talk = demands.fit([user, _calling(calls), *map(_result, calls)], None)[0]
        text = attempt(talk, tools)
        return text is not None and all(name in text for name, _ in calls)

    one, two = CALLS
    short_ids = not shown(NONE, one) and shown(Demands(short_ids=True), one)
    ids = Demands(short_ids=short_ids)
    single = Demands(short_ids=short_ids, one_call=True)
    one_call = not shown(ids, one, two) and shown(single, one, two)
    return Demands(told, short_ids, one_call)


def _naming_results(messages: Sequence[Message]) -> list[Message]:
    """Each result with the name of the function it came from, which some templates show and
    OpenAI's clients leave out."""
    names: dict[Any, Any] = {}
    named: list[Message] = []
    for message in messages:
        for call in message.get("tool_calls") or ():
            names[call.get("id")] = (call.get("function") or {}).get("name")
        name = names.get(message.get("tool_call_id")) if message.get("role") == "tool" else None
        named.append({**message, "name": name} if name and not message.get("name") else message)
    return named


def _calling(calls: Sequence[tuple[str, str]]) -> Message:
    told = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": {"what": "x"}}}
        for name, id in calls
    ]
    return {"role": "assistant", "content": "", "tool_calls": told}


def _result(call: tuple[str, str]) -> Message:
    return {"role": "tool", "content": "!", "tool_call_id": call[1]}


def _telling(tool: Any, told: int) -> Any:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not told or not isinstance(function, Mapping):
        return tool
    rest = {name: value for name, value in function.items() if name != "name"}
    filled = {"name": function.get("name", ""), "description": "", **rest}
    if told > 1:
        parameters = filled.get("parameters") or {}
        properties = parameters.get("properties") or {}
        if told > MOST_TOLD - 1:
            properties = {name: _described(each) for name, each in properties.items()}
        filled["parameters"] = {"type": "object", **parameters, "properties": properties}
    return {**tool, "function": filled}


def _described(schema: Any) -> Any:
    return {"description": "", **schema} if isinstance(schema, Mapping) else schema


def _with_short_ids(message: Message) -> Message:
    fitting = dict(message)
    if isinstance(calls := message.get("tool_calls"), list | tuple):
        fitting["tool_calls"] = [{**call, "id": _short(call.get("id"))} for call in calls]
    if message.get("role") == "tool":
        fitting["tool_call_id"] = _short(message.get("tool_call_id"))
    return fitting


def _short(id: Any) -> str:
    """The same for the same id, here and in every later request."""
    text = id if isinstance(id, str) else ""
    if SHORT_ID.fullmatch(text):
        return text
    return blake3(text.encode(errors="surrogatepass")).hexdigest()[:ID_CHARACTERS]


def _one_by_one(messages: Sequence[Message]) -> Iterator[Message]:
    """Each call in a message of its own, and what it returned right behind it."""
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        calls = message.get("tool_calls")
        if not isinstance(calls, list | tuple) or len(calls) < 2:
            yield message
            continue
        results = []
        while at < len(messages) and messages[at].get("role") == "tool":
            results.append(messages[at])
            at += 1
        yield from _parted(message, calls, results)


def _parted(message: Message, calls: Sequence[Any], results: list[Message]) -> Iterator[Message]:
    for number, call in enumerate(calls):
        yield {**(message if not number else _silent(message)), "tool_calls": [call]}
        is_last = number == len(calls) - 1
        own = [each for each in results if is_last or each.get("tool_call_id") == call.get("id")]
        results = [each for each in results if each not in own]
        yield from own


def _silent(message: Message) -> Message:
    """Without what was said and thought before the first call."""
    return {"role": message.get("role"), "content": ""}
