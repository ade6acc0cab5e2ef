"""Every hash of a conversation, made in one walk over its messages.

Segments name in a report the part of a conversation changed, reply keys find assistant messages
that are remembered, and the fingerprint names conversations whose client gives them no name. All
three only propose or explain; what is reused is decided by comparing tokens. They are stored with
entries on disk, so their values must not change from one version to the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from blake3 import blake3

from rekindle.chat.images import digests_of
from rekindle.chat.messages import (
    REASONING_FIELDS,
    SYSTEM_ROLES,
    Message,
    call_values,
    canonical,
    content_text,
    tool_calls,
    with_text_after,
)

CALL_KEY, HISTORY_KEY = "call:", "said:"  # by the id of a call; by all messages up to the reply
SEGMENT_DIGITS = 16
EDGE_CHARACTERS = 32  # of each end of a text, in a fingerprint
#: Names, and what clients leave out when they send a message back.
UNHASHED_FIELDS = frozenset({"message_id", "tool_call_id", *REASONING_FIELDS})

Segment = tuple[str, str]  # kind and hash
Segments = tuple[Segment, ...]


class HashChain:
    """The hash of a list of parts, at any time while it grows."""

    def __init__(self) -> None:
        self._hasher = blake3()

    def add(self, part: bytes) -> None:
        # Framed by its length, so that ("ab", "c") and ("a", "bc") have different hashes.
        self._hasher.update(len(part).to_bytes(8, "big") + part)

    def hexdigest(self) -> str:
        return self._hasher.hexdigest()

    def copy(self) -> HashChain:
        other = HashChain()
        other._hasher = self._hasher.copy()
        return other


@dataclass(frozen=True, slots=True)
class EntryHashes:
    """What an entry keeps of them."""

    segments: Segments
    reply_keys: tuple[str, ...]  # of the reply that it ends with; none: it ends with the request
    fingerprint: str


class ConversationHashes:
    """The hashes of the messages and tools of one request.

    The segments are ("system", hash) of all system messages, ("tools", hash), then ("turn", hash)
    for each turn: a user message with all that follows it, or what comes before the first.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        *,
        continued: bool = False,
        earlier: ConversationHashes | None = None,
    ) -> None:
        """`continued`: the reply goes on from the last message instead of following it. `earlier`:
        the hashes of a request whose messages these begin with, from which it goes on."""
        self.reply_keys: dict[int, tuple[str, ...]] = {}  # by the index of an assistant message
        #: Of all before the last user message; None when that is the first one.
        self.previous_fingerprint: str | None = None
        self._count = 0
        self._turns: list[list[str]] = []  # of each turn, the hash up to each of its messages
        self._system, self._turn = HashChain(), HashChain()
        self._history, self._outline = HashChain(), HashChain()
        self._system_hash = self._tools_hash = ""  # empty: there are none
        self._has_user = False
        self._continued: Message | None = None
        if earlier is not None and earlier._count <= len(messages) - continued:
            self._go_on_from(earlier)
        for index in range(self._count, len(messages)):
            if continued and index == len(messages) - 1:
                self._continued, self._before_last = messages[index], self._chains()
            self._add(index, messages[index])
        self._count = len(messages)
        self._tools = tools
        if earlier is not None and earlier._tools is tools:
            self._tools_hash = earlier._tools_hash
        elif tools:
            self._tools_hash = _hash_tools(tools)

    def _go_on_from(self, earlier: ConversationHashes) -> None:
        self.reply_keys = dict(earlier.reply_keys)
        self.previous_fingerprint = earlier.previous_fingerprint
        self._count = earlier._count
        self._turns = [*earlier._turns[:-1], *map(list, earlier._turns[-1:])]
        self._system, self._system_hash = earlier._system.copy(), earlier._system_hash
        self._turn, self._history, self._outline = earlier._chains()
        self._has_user = earlier._has_user

    @property
    def segments(self) -> Segments:
        return self._segments([turn[-1] for turn in self._turns])

    @property
    def fingerprint(self) -> str:
        """By which the conversation is recognised without a name; others may have the same."""
        return self._outline.hexdigest()

    def as_sent(self) -> EntryHashes:
        return EntryHashes(self.segments, (), self.fingerprint)

    def after(self, reply: Message) -> EntryHashes:
        """Those of the conversation with one more assistant message, or with a longer last one."""
        last, history, outline = self._chains()
        if self._continued is not None:
            last, history, outline = (chain.copy() for chain in self._before_last)
            more = with_text_after(self._continued, content_text(reply.get("content")))
            reply = {**reply, **more}
        segment, history_part = _forms(reply)
        last.add(segment)
        history.add(history_part)
        for field in _outline_fields(reply):
            outline.add(field)
        turns = [turn[-1] for turn in self._turns[:-1]]
        return EntryHashes(
            self._segments([*turns, _segment_hash(last)]),
            (*_call_keys(reply), HISTORY_KEY + history.hexdigest()),
            outline.hexdigest(),
        )

    def _chains(self) -> tuple[HashChain, HashChain, HashChain]:
        return self._turn.copy(), self._history.copy(), self._outline.copy()

    def first_change(self, stored: Segments) -> str | None:
        """The first part of what is stored that differs here: "system", "tools", "turn 3"…

        A last stored turn that has only grown (by a reply, by a tool's result) is no change.
        """
        here = self._segments([])
        for kind in ("system", "tools"):
            if _of_kind(kind, stored) != _of_kind(kind, here):
                return kind
        turns = _of_kind("turn", stored)
        sent = self._turns[: len(turns)]
        for number, (one, turn) in enumerate(zip_longest(turns, sent, fillvalue=()), start=1):
            may_have_grown = number == len(turns)
            if one not in (turn if may_have_grown else turn[-1:]):
                return f"turn {number}"
        return None

    def _segments(self, turns: Sequence[str]) -> Segments:
        found = [("system", self._system_hash), ("tools", self._tools_hash)]
        return *((kind, hash) for kind, hash in found if hash), *(("turn", turn) for turn in turns)

    def _add(self, index: int, message: Message) -> None:
        segment, history_part = _forms(message)
        self._history.add(history_part)
        if message.get("role") == "assistant":
            keys = (*_call_keys(message), HISTORY_KEY + self._history.hexdigest())
            self.reply_keys[index] = keys
        self._add_to_segment(message, segment)
        self._add_to_fingerprint(message)

    def _add_to_segment(self, message: Message, segment: bytes) -> None:
        if _is_system(message):
            self._system.add(segment)
            self._system_hash = _segment_hash(self._system)
            return
        if message.get("role") == "user" or not self._turns:
            self._turn = HashChain()
            self._turns.append([])
        self._turn.add(segment)
        self._turns[-1].append(_segment_hash(self._turn))

    def _add_to_fingerprint(self, message: Message) -> None:
        if message.get("role") == "user":
            self.previous_fingerprint = self.fingerprint if self._has_user else None
            self._has_user = True
        for field in _outline_fields(message):
            self._outline.add(field)


def _forms(message: Message) -> tuple[bytes, bytes]:
    """What is hashed of a message: for its segment, and for the keys of replies."""
    calls, pictures = call_values(message), digests_of(message.get("content"))
    text, called = content_text(message.get("content")).strip(), canonical(calls).decode()
    history_part = canonical([message.get("role"), text, called, *pictures])
    return canonical(_hashed_fields(message, calls)), history_part


def _hashed_fields(message: Message, calls: list[list[Any]]) -> dict[str, Any]:
    """The fields with a value: clients add empty ones, and write calls in their own way."""
    fields = {
        field: value
        for field, value in message.items()
        if field not in UNHASHED_FIELDS and value is not None
    }
    if calls:
        fields["tool_calls"] = calls
        if not fields.get("content"):
            fields.pop("content", None)
    return fields


def _outline_fields(message: Message) -> Iterator[bytes]:
    """Role, length and both ends of a message; of an assistant message its end alone, because
    clients remove the reasoning, which changes its length and beginning."""
    role, text = str(message.get("role", "")), content_text(message.get("content"), separator="")
    yield _utf8(role)
    if role != "assistant":
        yield str(len(text)).encode()
        yield _utf8(text[:EDGE_CHARACTERS])
    yield _utf8(text[-EDGE_CHARACTERS:])
    yield from map(_utf8, digests_of(message.get("content")))


def _call_keys(message: Message) -> Iterator[str]:
    ids = (call.get("id") for call in tool_calls(message) if isinstance(call, Mapping))
    return (CALL_KEY + id for id in ids if isinstance(id, str) and id)


def _hash_tools(tools: Sequence[Any]) -> str:
    items = sorted(canonical(tool).decode() for tool in tools)
    return blake3(canonical(items)).hexdigest()[:SEGMENT_DIGITS]


def _segment_hash(chain: HashChain) -> str:
    return chain.hexdigest()[:SEGMENT_DIGITS]


def _of_kind(kind: str, segments: Segments) -> list[str]:
    return [hash for name, hash in segments if name == kind]


def _is_system(message: Message) -> bool:
    return message.get("role") in SYSTEM_ROLES


def _utf8(text: str) -> bytes:
    return text.encode(errors="surrogatepass")  # a lone surrogate is refused later, with a reason
