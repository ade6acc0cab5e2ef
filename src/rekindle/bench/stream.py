"""The lines of a streamed chat completion, parsed without I/O and without a clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from rekindle.errors import RekindleError


class BenchFailed(RekindleError):
    """The server did something a measurement cannot go on with; the message says what."""


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None  # None: the server does not say
    first_token_time: Mapping[str, float] = field(default_factory=dict)  # seconds by stage

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Usage:
        details = raw.get("prompt_tokens_details") or {}
        stages = raw.get("first_token_time") or {}
        return cls(
            raw["prompt_tokens"], raw["completion_tokens"], details.get("cached_tokens"), stages
        )


@dataclass(frozen=True, slots=True)
class Chunk:
    """One event of the stream: new text, thought or usage; often only one of them."""

    text: str = ""
    thought: str = ""
    usage: Usage | None = None


def parse(line: str) -> Chunk | None:
    """Return the line's chunk, None for a line without one; raise BenchFailed for an error."""
    if not line.startswith("data:"):
        return None
    data = line.removeprefix("data:").strip()
    if data == "[DONE]":
        return None
    try:
        return _chunk(orjson.loads(data))
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise BenchFailed(f"the server sent an event that is no chunk: {data[:200]}") from error


def _chunk(event: Mapping[str, Any]) -> Chunk:
    if error := event.get("error"):
        raise BenchFailed(f"the server ended the stream with an error: {error_message(error)}")
    choices = event.get("choices") or [{}]
    delta = choices[0].get("delta") or {}
    usage = event.get("usage")
    return Chunk(
        text=delta.get("content") or "",
        thought=delta.get("reasoning_content") or delta.get("reasoning") or "",
        usage=Usage.parse(usage) if usage else None,
    )


def error_message(error: Any) -> str:
    """The sentence inside OpenAI's error shape, or the error as it came."""
    return str(error.get("message", error)) if isinstance(error, Mapping) else str(error)
