"""Scenario: what it costs a reply to follow a JSON schema, beside the same prompt without one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rekindle.bench.decode import tokens_per_s
from rekindle.bench.reply import Reply
from rekindle.bench.rig import Rig, user

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


@dataclass(frozen=True, slots=True)
class Schema:
    free_tokens_per_s: float
    schema_tokens_per_s: float

    def figures(self) -> dict[str, float]:
        return {
            "schema_tokens_per_s": self.schema_tokens_per_s,
            "schema_over_free": self.free_tokens_per_s / self.schema_tokens_per_s,
        }


async def measure(rig: Rig) -> Schema:
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
    return Schema(_rate(free), _rate(bound))


def _rate(replies: list[Reply]) -> float:
    """The best of them: a reply is slowed down by what else the machine does, never sped up."""
    return max(tokens_per_s([reply]) for reply in replies)
