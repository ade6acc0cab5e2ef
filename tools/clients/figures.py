"""Reads the usage of an answer in any dialect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tools.clients.recorder import Exchange


@dataclass(frozen=True)
class Turn:
    prompt_tokens: int
    reused_tokens: int
    has_tools: bool  # side requests, such as for a title, have none
    normalised: tuple[str, ...] = ()

    @property
    def share(self) -> float:
        return self.reused_tokens / self.prompt_tokens


def turn_of(exchange: Exchange) -> Turn | None:
    """The usage of an exchange, or None if a model did not answer it."""
    counts, report = None, dict[str, Any]()
    for event in _events(exchange.answer):
        answer = event.get("response") or event
        report = event.get("x_cache") or answer.get("x_cache") or report
        counts = _counts(answer) or counts
    if counts is None:
        return None
    return Turn(*counts, bool(exchange.body.get("tools")), tuple(report.get("normalised", ())))


def _events(answer: str) -> Iterator[dict[str, Any]]:
    """The events of a stream. An answer that is not streamed counts as one event."""
    lines = answer.splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    for text in data or [answer]:
        if text.startswith("{"):
            event: dict[str, Any] = json.loads(text)
            yield event


def _counts(answer: dict[str, Any]) -> tuple[int, int] | None:
    """The number of prompt tokens, and how many of them were reused."""
    usage = answer.get("usage") or {}
    if timings := answer.get("timings"):  # chat completions, even without `usage`
        return timings["cache_n"] + timings["prompt_n"], timings["cache_n"]
    if "output_tokens" in usage and "cache_read_input_tokens" in usage:
        reused = usage["cache_read_input_tokens"]
        return reused + usage["input_tokens"] + usage["cache_creation_input_tokens"], reused
    if details := usage.get("input_tokens_details"):
        return usage["input_tokens"], details["cached_tokens"]
    return None
