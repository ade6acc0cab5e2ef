"""The parts of a conversation by their hashes, to say in words what changed.

They explain a decision; tokens make it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

from blake3 import blake3

from rekindle.chat.content import Message
from rekindle.chat.replay import REASONING, Chain, calls_said, canonical

SYSTEM_ROLES = ("system", "developer")
HASH_DIGITS = 16
UNSAID = frozenset({"message_id", "tool_call_id", *REASONING})  # names, and what clients leave out

Segments = Sequence[tuple[str, str]]
Parts = tuple[tuple[str, str], ...]


def segments(messages: Sequence[Message], tools: Sequence[Any] | None) -> Parts:
    """("system", hash) of all system messages, ("tools", hash), then ("turn", hash) for each turn.

    A turn is a user message with all that follows it; what comes before the first is one, too.
    """
    return Told(messages, tools).segments


class Told:
    """A conversation's segments, and those after one more reply."""

    def __init__(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> None:
        found: list[tuple[str, str]] = []
        if system := [message for message in messages if _is_system(message)]:
            found.append(("system", _hash(system)))
        if tools:
            found.append(("tools", _digest(sorted(canonical(tool).decode() for tool in tools))))
        turns = list(_turns(messages))
        self._before: Parts = (*found, *(("turn", _hash(turn)) for turn in turns[:-1]))
        self._last = Chain()  # of the last turn, which a reply goes on with
        hashes = [_added(self._last, message) for message in turns[-1]] if turns else []
        self.segments: Parts = (*self._before, *(("turn", hash) for hash in hashes[-1:]))

    def after(self, reply: Message) -> Parts:
        return *self._before, ("turn", _added(self._last.copy(), reply))


def first_change(stored: Segments, sent: Segments, messages: Sequence[Message] = ()) -> str | None:
    """The first part of what is stored that is another in the request: "system", "turn 3"…

    A hash does not tell an edited turn from one that only grew (a reply, a tool's result). Given
    the request's `messages`, a last stored turn that grew is no change; without them it is one.
    """
    for kind in ("system", "tools"):
        if _of(kind, stored) != _of(kind, sent):
            return kind
    before, after = _of("turn", stored), _of("turn", sent)
    for number, (one, other) in enumerate(zip_longest(before, after[: len(before)]), start=1):
        if one != other and not (number == len(before) and _grew(one, number, messages)):
            return f"turn {number}"
    return None


def _grew(stored: str, number: int, messages: Sequence[Message]) -> bool:
    """Whether the request's turn begins with all of the stored one."""
    turn = next((turn for at, turn in enumerate(_turns(messages), start=1) if at == number), [])
    return stored in list(_hashes(turn))[:-1]


def _of(kind: str, parts: Segments) -> list[str]:
    return [hash for name, hash in parts if name == kind]


def _turns(messages: Sequence[Message]) -> Iterator[list[Message]]:
    turn: list[Message] = []
    for message in messages:
        if _is_system(message):
            continue
        if message.get("role") == "user" and turn:
            yield turn
            turn = []
        turn.append(message)
    if turn:
        yield turn


def _is_system(message: Message) -> bool:
    return message.get("role") in SYSTEM_ROLES


def _hash(messages: Sequence[Message]) -> str:
    *_, last = _hashes(messages)
    return last


def _hashes(messages: Sequence[Message]) -> Iterator[str]:
    """The hash of each beginning of these messages, up to all of them."""
    chain = Chain()
    return (_added(chain, message) for message in messages)


def _added(chain: Chain, message: Message) -> str:
    return chain.add(canonical(_said(message)))[:HASH_DIGITS]


def _said(message: Message) -> dict[str, Any]:
    """The message without names, and without the empty fields that clients send back; its calls
    however they are written."""
    said = {
        field: value
        for field, value in message.items()
        if field not in UNSAID and value is not None
    }
    if calls := calls_said(message):
        said["tool_calls"] = calls
        if not said.get("content"):
            said.pop("content", None)
    return said


def _digest(items: list[str]) -> str:
    return blake3(canonical(items)).hexdigest()[:HASH_DIGITS]
