"""Measures what agents send: JSON schemas, tool loops and pictures."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

import orjson
from PIL import Image, ImageDraw

from rekindle.bench.client import Message, StreamedReply
from rekindle.bench.rig import (
    BenchConversation,
    Rig,
    Round,
    TimedTurn,
    computed_figure,
    user,
)
from rekindle.bench.scenarios import Agents, agent_prompts, tokens_per_s

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "mood": {"enum": ["good", "bad", "mixed"]},
        "likes": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 3},
    },
    "required": ["name", "age", "mood", "likes"],
    "additionalProperties": False,
}
#: Asks for more people than a reply has tokens for, so that no reply ends early.
_SCHEMA = {
    "type": "object",
    "properties": {"people": {"type": "array", "items": _PERSON, "minItems": 500}},
    "required": ["people"],
    "additionalProperties": False,
}
RESPONSE_FORMAT: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {"name": "people", "schema": _SCHEMA, "strict": True},
}


def _tool(name: str, description: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": schema},
    }


TOOLS = (
    _tool("read_notes", "Read what was written down about a place.", place="Which place."),
    _tool("ask_person", "Ask somebody.", person="Whom to ask.", question="What to ask."),
    _tool("write_notes", "Write something down.", place="About which place.", text="What."),
)


@dataclass(frozen=True, slots=True)
class Schema(Round):
    """The decode speed of a reply that follows a JSON schema, and of one that does not."""

    free_tokens_per_s: float
    schema_tokens_per_s: float

    def figures(self) -> dict[str, float]:
        return {
            "schema_tokens_per_s": self.schema_tokens_per_s,
            "schema_over_free": self.free_tokens_per_s / self.schema_tokens_per_s,
        }


async def measure_schema(rig: Rig) -> Schema:
    chat = user(f"{rig.nonce()}: list the people who were there, as JSON.")
    tokens = rig.options.single_stream_tokens
    free: list[StreamedReply] = []
    bound: list[StreamedReply] = []
    # The first request caches the prompt and compiles the grammar, which are not measured.
    await rig.client.chat(chat, 2, response_format=RESPONSE_FORMAT)
    for _ in range(3):  # in turns, so that disturbances of the machine affect both
        free.append(await rig.full_reply(chat, tokens))
        bound.append(await rig.client.chat(chat, tokens, response_format=RESPONSE_FORMAT))
    return Schema(_best_rate(free), _best_rate(bound))


def _best_rate(replies: list[StreamedReply]) -> float:
    """The highest speed. Other programs on the machine only slow a reply down."""
    return max(tokens_per_s([reply]) for reply in replies)


@dataclass(frozen=True, slots=True)
class ToolLoop(Agents):
    """Agents in tool loops that take turns.

    Calls and results are scripted, so that every server reads the same histories. The calls of a
    small model would be random.
    """

    scenario: ClassVar[str] = "toolloop"

    def figures(self) -> dict[str, float]:
        return {
            **Agents.figures(self),  # the slots of a dataclass break super()
            "toolloop_prompt_tokens": sum(turn.prompt_tokens for turn in self.warm),
            **computed_figure("toolloop_computed_tokens", self.warm),
        }


async def measure_toolloop(rig: Rig) -> ToolLoop:
    """Each history grows by a call and its result before each reply except the first. It continues
    with the next scripted call instead of the reply."""
    task = user("Find out what happened there, and write it down.")
    histories = [[{"role": "system", "content": text}, *task] for text in agent_prompts(rig)]
    limit = rig.options.turn_reply_tokens
    rounds = []
    for number in range(rig.options.agent_rounds):
        for history in histories if number > 0 else ():
            history += _tool_use(rig, f"call{len(history):05}")
        turns = []
        for history in histories:
            chat = rig.client.chat(history, limit, tools=TOOLS, tool_choice="none")
            turns.append(TimedTurn.of(await chat))
        rounds.append(tuple(turns))
    return ToolLoop(tuple(rounds))


def _tool_use(rig: Rig, call_id: str) -> list[Message]:
    """A call and its result. Some templates accept only ids of nine characters."""
    arguments = orjson.dumps({"place": rig.nonce()}).decode()
    function = {"name": "read_notes", "arguments": arguments}
    call = {"id": call_id, "type": "function", "function": function}
    result = rig.prose(rig.options.tool_result_tokens)
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": result},
    ]


@dataclass(frozen=True, slots=True)
class Pictures(Round):
    """Two questions about a new picture in one conversation, and one in another conversation."""

    first: TimedTurn
    second: TimedTurn
    other: TimedTurn

    def figures(self) -> dict[str, float]:
        return {
            "pictures_first_s": self.first.ttft_s,
            "pictures_second_s": self.second.ttft_s,
            "pictures_other_s": self.other.ttft_s,
            "pictures_second_over_first": self.second.ttft_s / self.first.ttft_s,
        }


async def measure_pictures(rig: Rig) -> Pictures:
    picture = _picture_part(rig.chance)
    talk = BenchConversation(rig)
    first = await talk.ask([picture, {"type": "text", "text": "What do you see?"}])
    second = await talk.ask("What color is the background?")
    count = {"type": "text", "text": "How many shapes are there?"}
    other = await BenchConversation(rig).ask([picture, count])
    return Pictures(first, second, other)


def _picture_part(chance: Random, side: int = 512) -> Message:
    """Draw random shapes on white, as a `data:` URL."""
    picture = Image.new("RGB", (side, side), "white")
    draw = ImageDraw.Draw(picture)
    for colour in chance.sample(("red", "blue", "green", "yellow", "purple", "orange"), 2):
        left, top = (chance.randrange(side * 2 // 3) for _ in range(2))
        size = chance.randrange(side // 6, side // 3)
        shape = chance.choice((draw.rectangle, draw.ellipse))
        shape((left, top, left + size, top + size), fill=colour)
    file = io.BytesIO()
    picture.save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}
