"""A reply taken apart: what is said to the user, what the model wrote for itself, what it calls."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Said(NamedTuple):
    """Text for the user."""

    text: str


class Thought(NamedTuple):
    """Text that the model wrote for itself."""

    text: str


class Called(NamedTuple):
    """A call begins; its arguments follow. Calls are counted from 0."""

    call: int
    name: str


class Argued(NamedTuple):
    """The next piece of the arguments of the call that began last, as JSON text."""

    call: int
    text: str


Part = Said | Thought | Called | Argued


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
