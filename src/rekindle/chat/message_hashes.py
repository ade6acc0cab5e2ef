"""Computes all hashes of a conversation in one pass over its messages.

Segments tell a report which part of a conversation changed. Reply keys look up remembered assistant
messages. The fingerprint identifies a conversation whose client gives it no name. Hashes only
propose or explain: token comparison decides what is reused. Entries on disk contain them, so their
values must not change between versions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from blake3 import blake3

from rekindle.chat.messages import (
    REASONING_FIELDS,
    Message,
    call_values,
    canonical,
    content_text,
    is_system,
    picture_digests,
    tool_calls,
    with_text_after,
)

CALL_KEY, HISTORY_KEY = "call:", "said:"  # a call's id; all messages up to and with the reply
SEGMENT_DIGITS = 16
# Ids, and fields that clients drop when they send a message back.
UNHASHED_FIELDS = frozenset({"message_id", "tool_call_id", *REASONING_FIELDS})

Segment = tuple[str, str]  # kind and hash
Segments = tuple[Segment, ...]


class HashChain:
    def __init__(self) -> None:
        self._hasher = blake3()

    def add(self, part: bytes) -> None:
        # The length in front makes ("ab", "c") and ("a", "bc") differ.
        self._hasher.update(len(part).to_bytes(8, "big") + part)

    def hexdigest(self) -> str:
        return self._hasher.hexdigest()

    def copy(self) -> HashChain:
        other = HashChain()
        other._hasher = self._hasher.copy()
        return other


@dataclass(frozen=True, slots=True)
class EntryHashes:
    segments: Segments
    reply_keys: tuple[str, ...]  # of the final reply, or empty if the entry ends with the request
    fingerprint: str


class ConversationHashes:
    """The hashes of the messages and tools of one request.

    The segments are ("system", hash) of all system messages, ("tools", hash), then ("turn", hash)
    of each turn. A turn is a user message and all messages up to the next one. Messages before the
    first user message are a turn too.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        *,
        continued: bool = False,
        earlier: ConversationHashes | None = None,
    ) -> None:
        """`continued`: the reply extends the last message instead of following it.

        `earlier` has the hashes of a request with which these messages begin.
        """
        self.reply_keys: dict[int, tuple[str, ...]] = {}  # by the index of an assistant message
        # The fingerprint before the last user message. None if that is the first one.
        self.previous_fingerprint: str | None = None
        self._messages, self._tools = messages, tools
        self._turns: list[list[str]] = []  # for each turn, the hash up to each of its messages
        self._system, self._turn = HashChain(), HashChain()
        self._history, self._outline = HashChain(), HashChain()
        self._system_hash = self._tools_hash = ""  # empty without system messages or tools
        self._has_user = False
        self._before_last: ConversationHashes | None = None  # only if the last one is continued
        if continued:
            earlier = ConversationHashes(messages[:-1], tools, earlier=earlier)
            self._before_last = earlier
        start = 0
        if earlier is not None and len(earlier._messages) <= len(messages):
            start = len(earlier._messages)
            self._start_from(earlier)
        for index in range(start, len(messages)):
            self._add(index, messages[index])
        if earlier is not None and earlier._tools is tools:
            self._tools_hash = earlier._tools_hash
        elif tools:
            items = sorted(canonical(tool).decode() for tool in tools)
            self._tools_hash = blake3(canonical(items)).hexdigest()[:SEGMENT_DIGITS]

    def _start_from(self, earlier: ConversationHashes) -> None:
        self.reply_keys = dict(earlier.reply_keys)
        self.previous_fingerprint = earlier.previous_fingerprint
        self._turns = [*earlier._turns[:-1], *map(list, earlier._turns[-1:])]
        self._system, self._turn = earlier._system.copy(), earlier._turn.copy()
        self._history, self._outline = earlier._history.copy(), earlier._outline.copy()
        self._system_hash, self._has_user = earlier._system_hash, earlier._has_user

    @property
    def segments(self) -> Segments:
        return self._segments([turn[-1] for turn in self._turns])

    @property
    def fingerprint(self) -> str:
        """Identifies a conversation without a name. It is not unique."""
        return self._outline.hexdigest()

    def as_sent(self) -> EntryHashes:
        return EntryHashes(self.segments, (), self.fingerprint)

    def after(self, reply: Message) -> EntryHashes:
        """The hashes of the conversation with the reply added to it or to its last message."""
        begun, messages = self, self._messages
        if self._before_last is not None:
            *messages, last = messages
            begun = self._before_last
            more = with_text_after(last, content_text(reply.get("content")))
            reply = {**reply, **more}
        whole = ConversationHashes([*messages, reply], self._tools, earlier=begun)
        return EntryHashes(whole.segments, whole.reply_keys[len(messages)], whole.fingerprint)

    def first_change(self, stored: Segments) -> str | None:
        """The first stored segment that differs here: "system", "tools", "turn 3"…

        A last stored turn that has only grown (by a reply or a tool result) is not a change.
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
        segment, history_part = _hashed_forms(message)
        role = message.get("role")
        self._history.add(history_part)
        if role == "assistant":
            keys = (*_call_keys(message), HISTORY_KEY + self._history.hexdigest())
            self.reply_keys[index] = keys
        if is_system(message):
            self._system.add(segment)
            self._system_hash = _segment_hash(self._system)
        else:
            if role == "user" or not self._turns:
                self._turn = HashChain()
                self._turns.append([])
            self._turn.add(segment)
            self._turns[-1].append(_segment_hash(self._turn))
        if role == "user":
            self.previous_fingerprint = self.fingerprint if self._has_user else None
            self._has_user = True
        for field in _outline_fields(message):
            self._outline.add(field)


def _hashed_forms(message: Message) -> tuple[bytes, bytes]:
    """The bytes of a message that enter its segment, and those that enter reply keys."""
    calls, pictures = call_values(message), picture_digests(message.get("content"))
    text, called = content_text(message.get("content")).strip(), canonical(calls).decode()
    # Clients add empty fields, and format calls in their own way.
    fields = {
        field: value
        for field, value in message.items()
        if field not in UNHASHED_FIELDS and value is not None
    }
    if calls:
        fields["tool_calls"] = calls
        if not fields.get("content"):
            fields.pop("content", None)
    return canonical(fields), canonical([message.get("role"), text, called, *pictures])


def _outline_fields(message: Message, edge_characters: int = 32) -> Iterator[bytes]:
    """Role, length and both ends of a message.

    For an assistant message only the end, because clients remove the reasoning. That changes the
    length and the beginning.
    """
    role, text = str(message.get("role", "")), content_text(message.get("content"), separator="")
    yield _utf8(role)
    if role != "assistant":
        yield str(len(text)).encode()
        yield _utf8(text[:edge_characters])
    yield _utf8(text[-edge_characters:])
    yield from map(_utf8, picture_digests(message.get("content")))


def _call_keys(message: Message) -> Iterator[str]:
    ids = (call.get("id") for call in tool_calls(message) if isinstance(call, Mapping))
    return (CALL_KEY + id for id in ids if isinstance(id, str) and id)


def _segment_hash(chain: HashChain) -> str:
    return chain.hexdigest()[:SEGMENT_DIGITS]


def _of_kind(kind: str, segments: Segments) -> list[str]:
    return [hash for name, hash in segments if name == kind]


def _utf8(text: str) -> bytes:
    return text.encode(errors="surrogatepass")  # encoding refuses a lone surrogate later
