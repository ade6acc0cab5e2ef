"""Feeds replies to a parser in pieces and collects the parts."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from rekindle.chat.tools.format import ReplyFormat
from rekindle.chat.tools.registry import select
from rekindle.chat.tools.stream import ReplyParser
from rekindle.protocol.events import ArgumentsDelta, Part, ReasoningDelta, TextDelta, ToolCallStart

BAR = "\uff5c"  # DeepSeek's markers have it


class Call(NamedTuple):
    name: str
    arguments: str

    @property
    def value(self) -> Any:
        return json.loads(self.arguments)


class ParsedReply(NamedTuple):
    """All parts of a reply."""

    parts: list[Part]
    ended_calls: int

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, TextDelta))

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, ReasoningDelta))

    @property
    def calls(self) -> list[Call]:
        calls: list[Call] = []
        for part in self.parts:
            if isinstance(part, ToolCallStart):
                assert part.index == len(calls), "calls are counted from 0"
                calls.append(Call(part.name, ""))
            elif isinstance(part, ArgumentsDelta):
                assert part.index == len(calls) - 1, "arguments belong to the last call"
                calls[-1] = Call(calls[-1].name, calls[-1].arguments + part.text)
        return calls


def tool(name: str, **types: Any) -> dict[str, Any]:
    schemas = {
        key: {"type": type_} if isinstance(type_, str) else type_ for key, type_ in types.items()
    }
    parameters = {"type": "object", "properties": schemas}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    tool("f", a="integer", b="string"),
    tool("g"),
    tool(
        "get_weather",
        city="string",
        location="string",
        unit="string",
        days="integer",
        metric="string",
        at={"type": "object"},
    ),
    tool("add", a="number", b="number"),
]


def join(parts: Iterable[Part]) -> list[Part]:
    """The parts, with adjacent texts of the same kind joined."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, ToolCallStart) or type(last) is not type(part):
            joined.append(part)
        elif isinstance(part, ArgumentsDelta) and isinstance(last, ArgumentsDelta):
            assert part.index == last.index
            joined[-1] = ArgumentsDelta(part.index, last.text + part.text)
        elif isinstance(part, TextDelta | ReasoningDelta) and isinstance(
            last, TextDelta | ReasoningDelta
        ):
            joined[-1] = type(part)(last.text + part.text)
    return joined


def feed(parser: ReplyParser, pieces: Iterable[str], *, cut_off: bool = False) -> ParsedReply:
    parts: list[Part] = []
    for piece in pieces:
        parts += parser.push(piece)
    parts += parser.finish(cut=cut_off)
    assert all(part.text for part in parts if not isinstance(part, ToolCallStart)), "no empty part"
    return ParsedReply(join(parts), parser.ended_calls)


def cut(text: str, places: Iterable[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


def parse_reply(
    format: ReplyFormat | str,
    text: str,
    *,
    tools: Sequence[dict[str, Any]] = TOOLS,
    calls: bool = True,
    opened: bool = False,
) -> ParsedReply:
    """Parses a reply whole, by characters and in random cuts, and checks that the results agree."""
    form = select(None, tool_format=format) if isinstance(format, str) else format
    random_cuts = random.Random(text)

    def fed(pieces: Iterable[str]) -> ParsedReply:
        return feed(form.parser(tools, calls=calls, opened=opened), pieces)

    whole = fed([text])
    assert fed(text) == whole
    for count in (1, 3, 10, 30):
        places = [random_cuts.randrange(len(text) + 1) for _ in range(count)]
        assert fed(cut(text, places)) == whole
    return whole
