"""Scenarios of agents' requests: tool loops, and replies that follow a JSON schema."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import median
from typing import Any

import orjson
from PIL import Image, ImageDraw

from rekindle.bench.client import BenchFailed, Message, StreamedReply
from rekindle.bench.rig import BenchConversation, Rig, TimedTurn, user

# ----------------------------------------------------------------------
# Scenarios of decoding: how fast text is written, greedily and with temperature.

SAMPLING = {"temperature": 0.8, "top_p": 0.95, "seed": 1}


@dataclass(frozen=True, slots=True)
class Decode:
    """How fast text is written, by one stream alone and by several together."""

    single_tokens_per_s: float
    together_tokens_per_s: float
    streams: int

    def figures(self) -> dict[str, float]:
        return {
            "decode_single_tokens_per_s": self.single_tokens_per_s,
            "decode_together_tokens_per_s": self.together_tokens_per_s,
        }


@dataclass(frozen=True, slots=True)
class SampledDecode:
    """The same with temperature, which costs a choice among many candidates for every token."""

    decode: Decode

    def figures(self) -> dict[str, float]:
        return {
            "sampled_single_tokens_per_s": self.decode.single_tokens_per_s,
            "sampled_together_tokens_per_s": self.decode.together_tokens_per_s,
        }


async def measure_decode(rig: Rig, **sampling: float) -> Decode:
    """Tokens a second after the first token, alone and together."""
    options = rig.options
    return Decode(
        single_tokens_per_s=await _rate(rig, 1, options.single_stream_tokens, sampling),
        together_tokens_per_s=await _rate(rig, options.streams, options.stream_tokens, sampling),
        streams=options.streams,
    )


async def measure_sampled(rig: Rig) -> SampledDecode:
    return SampledDecode(await measure_decode(rig, **SAMPLING))


async def _rate(rig: Rig, streams: int, tokens: int, sampling: Mapping[str, float]) -> float:
    chats = [user(f"{rig.nonce()}: tell a story about it.") for _ in range(streams)]
    # Prompts are put in place first: otherwise one stream's prefill falls into another's decode.
    await asyncio.gather(*(rig.full_reply(chat, 1) for chat in chats))
    replies = (rig.full_reply(chat, tokens, **sampling) for chat in chats)
    return tokens_per_s(await asyncio.gather(*replies))


def tokens_per_s(replies: Sequence[StreamedReply]) -> float:
    """All tokens but each reply's first, over the time from the earliest first to the last."""
    tokens = sum(reply.usage.completion_tokens - 1 for reply in replies)
    span_s = max(reply.last_s for reply in replies) - min(reply.first_s for reply in replies)
    if tokens <= 0 or span_s <= 0:
        raise BenchFailed("the replies are too short to measure a speed")
    return tokens / span_s


PAIRS = 3  # of replies, in turns: what disturbs the machine then disturbs both

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
#: More people than there are tokens to write them with: no reply ends early.
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
class Schema:
    """What it costs a reply to follow a JSON schema, beside the same prompt without one."""

    free_tokens_per_s: float
    schema_tokens_per_s: float

    def figures(self) -> dict[str, float]:
        return {
            "schema_tokens_per_s": self.schema_tokens_per_s,
            "schema_over_free": self.free_tokens_per_s / self.schema_tokens_per_s,
        }


async def measure_schema(rig: Rig) -> Schema:
    """Tokens a second after the first token, with a schema and without."""
    chat = user(f"{rig.nonce()}: list the people who were there, as JSON.")
    tokens = rig.options.single_stream_tokens
    free: list[StreamedReply] = []
    bound: list[StreamedReply] = []
    # The prompt and the grammar are put in place first: neither is a token's cost.
    await rig.client.chat(chat, 2, response_format=RESPONSE_FORMAT)
    for _ in range(PAIRS):
        free.append(await rig.full_reply(chat, tokens))
        bound.append(await rig.client.chat(chat, tokens, response_format=RESPONSE_FORMAT))
    return Schema(_best_rate(free), _best_rate(bound))


def _best_rate(replies: list[StreamedReply]) -> float:
    """The best of them: a reply is slowed down by what else the machine does, never sped up."""
    return max(tokens_per_s([reply]) for reply in replies)


@dataclass(frozen=True, slots=True)
class ToolLoop:
    """Agents in tool loops taking turns, more of them than a server has slots.

    Calls and results are scripted: what a small model would call is chance, and every server is to
    read the same histories.
    """

    rounds: tuple[tuple[TimedTurn, ...], ...]  # the first is cold

    @property
    def warm(self) -> list[TimedTurn]:
        return [turn for turns in self.rounds[1:] for turn in turns]

    def figures(self) -> dict[str, float]:
        waits_s = [turn.ttft_s for turn in self.warm]
        figures = {
            "toolloop_cold_s": median(turn.ttft_s for turn in self.rounds[0]),
            "toolloop_warm_s": median(waits_s),
            "toolloop_worst_s": max(waits_s),
            "toolloop_prompt_tokens": float(sum(turn.prompt_tokens for turn in self.warm)),
        }
        if all(turn.cached_tokens is not None for turn in self.warm):
            figures["toolloop_computed_tokens"] = sum(turn.computed_tokens for turn in self.warm)
        return figures


class Agent:
    """One history that grows by a call and its result before each reply but the first."""

    def __init__(self, rig: Rig, number: int) -> None:
        self._rig = rig
        system = f"{rig.nonce()}. You are agent {number}. {rig.prose(rig.options.agent_tokens)}"
        self._messages: list[Message] = [
            {"role": "system", "content": system},
            {"role": "user", "content": "Find out what happened there, and write it down."},
        ]

    def use_tool(self) -> None:
        number = len(self._messages)
        call_id = f"call{number:05}"  # nine characters, which is all that some templates take
        arguments = orjson.dumps({"place": self._rig.nonce()}).decode()
        function = {"name": "read_notes", "arguments": arguments}
        result = self._rig.prose(self._rig.options.tool_result_tokens)
        self._messages += [
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": call_id, "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": call_id, "content": result},
        ]

    async def reply(self) -> TimedTurn:
        """Timed, and left out of the history, which goes on with the next scripted call."""
        most = self._rig.options.turn_reply_tokens
        chat = self._rig.client.chat(self._messages, most, tools=TOOLS, tool_choice="none")
        return TimedTurn.of(await chat)


async def measure_toolloop(rig: Rig) -> ToolLoop:
    """Time to first token of each agent's turn, one agent after the other, round after round."""
    agents = [Agent(rig, number) for number in range(1, rig.options.agents + 1)]
    rounds = [tuple([await agent.reply() for agent in agents])]
    for _ in range(1, rig.options.agent_rounds):
        for agent in agents:
            agent.use_tool()
        rounds.append(tuple([await agent.reply() for agent in agents]))
    return ToolLoop(tuple(rounds))


# ----------------------------------------------------------------------
# A scenario of pictures: questions about one that the server has never seen.

SIDE_PIXELS = 512
COLOURS = ("red", "blue", "green", "yellow", "purple", "orange")
FIRST = "What do you see?"
SECOND = "What color is the background?"
OTHER = "How many shapes are there?"


@dataclass(frozen=True, slots=True)
class Pictures:
    """The first question about a picture, a second one in the same conversation, and one of
    another conversation that begins with the same picture."""

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
    """Time to first token of three questions about a picture that was drawn for this round."""
    picture = _picture_part(rig.chance)
    talk = BenchConversation(rig)
    first = await talk.ask([picture, {"type": "text", "text": FIRST}])
    second = await talk.ask(SECOND)
    other = await BenchConversation(rig).ask([picture, {"type": "text", "text": OTHER}])
    return Pictures(first, second, other)


def _picture_part(chance: Random) -> Message:
    """Shapes on white, nowhere the same twice, as a `data:` URL."""
    picture = Image.new("RGB", (SIDE_PIXELS, SIDE_PIXELS), "white")
    draw = ImageDraw.Draw(picture)
    for colour in chance.sample(COLOURS, 2):
        left, top = (chance.randrange(SIDE_PIXELS * 2 // 3) for _ in range(2))
        size = chance.randrange(SIDE_PIXELS // 6, SIDE_PIXELS // 3)
        shape = chance.choice((draw.rectangle, draw.ellipse))
        shape((left, top, left + size, top + size), fill=colour)
    file = io.BytesIO()
    picture.save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}
