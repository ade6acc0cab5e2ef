"""How a reply is taken apart into text, reasoning and tool calls."""

from __future__ import annotations

from typing import Protocol

from rekindle.protocol.events import Part


class Parser(Protocol):
    """A state machine over the text of one reply, which arrives in pieces of any size.

    The parts are the same however the text was cut, but for where texts are cut. Nothing is lost:
    what is no call after all is said, and arguments that are no JSON are passed on as they are.
    """

    @property
    def thinking(self) -> bool:
        """Whether what comes next is, as far as can be told, still thought."""

    @property
    def ended_calls(self) -> int:
        """How many calls are complete."""

    def push(self, text: str) -> list[Part]:
        """The parts that became certain with this text."""

    def finish(self) -> list[Part]:
        """The rest, when no more text comes."""
