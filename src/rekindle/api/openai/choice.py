"""One turn's answer as it grows."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from rekindle.protocol.events import (
    CallArguments,
    CallBegun,
    Event,
    Finished,
    Reasoning,
    Text,
    TokenLog,
)

log = logging.getLogger("rekindle.turn")

Said = Text | Reasoning | CallBegun | CallArguments  # what a reply is made of


@dataclass(slots=True)
class Call:
    """A function that the model calls, with what is known of its arguments."""

    id: str
    name: str
    pieces: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        return "".join(self.pieces)


@dataclass(slots=True)
class Choice:
    """What one turn has said."""

    pieces: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    logs: list[TokenLog] = field(default_factory=list)
    finished: Finished | None = None

    def add(self, event: Event) -> None:
        match event:
            case Text(_, text, logs):
                self.pieces.append(text)
                self.logs += logs or []
            case Reasoning(_, text):
                self.thoughts.append(text)
            case CallBegun():
                self.calls.append(Call(event.id, event.name))
            case CallArguments():
                self.calls[event.index].pieces.append(event.text)
            case Finished():
                self.finished = event
                log.info("%s", _line(event))

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def reasoning(self) -> str:
        return "".join(self.thoughts)


def _line(turn: Finished) -> str:
    """A finished turn in one line of the log."""
    cache = turn.cache
    source = f" from {cache.tier}" if cache.tier else ""
    return (
        f"{turn.prompt_tokens} prompt tokens: {cache.reused_tokens} reused{source} "
        f"({cache.status}, {cache.reason}), the rest in {turn.prompt_eval_s:.2f} s; "
        f"{turn.completion_tokens} generated ({turn.reason})"
    )
