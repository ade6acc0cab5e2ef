"""Scenarios of agents' requests: tool loops, and replies that follow a JSON schema."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

import orjson

from rekindle.bench.client import Message, Reply
from rekindle.bench.decode_scenarios import tokens_per_s
from rekindle.bench.rig import Rig, Turn, user

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
    free: list[Reply] = []
    bound: list[Reply] = []
    # The prompt and the grammar are put in place first: neither is a token's cost.
    await rig.client.chat(chat, 2, response_format=RESPONSE_FORMAT)
    for _ in range(PAIRS):
        free.append(await rig.full_reply(chat, tokens))
        bound.append(await rig.client.chat(chat, tokens, response_format=RESPONSE_FORMAT))
    return Schema(_best_rate(free), _best_rate(bound))


def _best_rate(replies: list[Reply]) -> float:
    """The best of them: a reply is slowed down by what else the machine does, never sped up."""
    return max(tokens_per_s([reply]) for reply in replies)


@dataclass(frozen=True, slots=True)
class ToolLoop:
    """Agents in tool loops taking turns, more of them than a server has slots.

    Calls and results are scripted: what a small model would call is chance, and every server is to
    read the same histories.
    """

    rounds: tuple[tuple[Turn, ...], ...]  # the first is cold

    @property
    def warm(self) -> list[Turn]:
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

    async def reply(self) -> Turn:
        """Timed, and left out of the history, which goes on with the next scripted call."""
        most = self._rig.options.turn_reply_tokens
        chat = self._rig.client.chat(self._messages, most, tools=TOOLS, tool_choice="none")
        return Turn.of(await chat)


async def measure_toolloop(rig: Rig) -> ToolLoop:
    """Time to first token of each agent's turn, one agent after the other, round after round."""
    agents = [Agent(rig, number) for number in range(1, rig.options.agents + 1)]
    rounds = [tuple([await agent.reply() for agent in agents])]
    for _ in range(1, rig.options.agent_rounds):
        for agent in agents:
            agent.use_tool()
        rounds.append(tuple([await agent.reply() for agent in agents]))
    return ToolLoop(tuple(rounds))
