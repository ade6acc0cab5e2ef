"""One choice of an answer as it grows: its message, and how its turn ended."""

from __future__ import annotations

import logging

from rekindle.protocol.events import Delta, Event, Finished
from rekindle.protocol.message import AssistantMessage

log = logging.getLogger("rekindle.turn")


class Choice:
    """Collects the events of one turn."""

    def __init__(self) -> None:
        self.message = AssistantMessage()
        self.finished: Finished | None = None

    def add(self, event: Event) -> None:
        match event:
            case Delta(_, part):
                self.message.add(part)
            case Finished():
                self.finished = event
                log.info("%s", _line(event))


def _line(turn: Finished) -> str:
    """A finished turn in one line of the log."""
    cache = turn.cache
    source = f" from {cache.tier}" if cache.tier else ""
    return (
        f"{turn.prompt_tokens} prompt tokens: {cache.reused_tokens} reused{source} "
        f"({cache.status}, {cache.reason}), the rest in {turn.prompt_eval_s:.2f} s; "
        f"{turn.completion_tokens} generated ({turn.reason})"
    )
