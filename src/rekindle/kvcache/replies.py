"""Replies as they were delivered, and where in a conversation's tokens they were sampled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Generic, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

MOST_REPLIES = 256  # of one conversation: the newest
MOST_BYTES = 1 << 20  # that they take together
MOST_FOUND = 8  # conversations that are looked at for one key
OVERHEAD_BYTES = 64  # of a reply beside its message and its keys

T = TypeVar("T")


class Reply(Struct, frozen=True, array_like=True):
    """One reply in a conversation. What it does not know any more is zero.

    The first `prompt_bytes` of its text and its first `prompt_tokens` are the prompt it was
    sampled after. With the reply they are the first `end_tokens`, and, when it is nothing but text,
    the first `end_bytes`.
    """

    keys: tuple[str, ...]
    message: bytes  # as JSON; empty when it is nothing but text
    prompt_bytes: int = 0
    prompt_tokens: int = 0
    end_tokens: int = 0
    end_bytes: int = 0

    @property
    def cost_bytes(self) -> int:
        return len(self.message) + sum(map(len, self.keys)) + OVERHEAD_BYTES

    def kept(self, common_bytes: int, common_tokens: int) -> Reply | None:
        """What is true of it in a conversation that shares so much; None: nothing is."""
        if self.prompt_bytes > common_bytes or self.prompt_tokens > common_tokens:
            return Reply(self.keys, self.message) if self.message else None
        if self.end_bytes > common_bytes or self.end_tokens > common_tokens:
            return replace(self, end_tokens=0, end_bytes=0)
        return self


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[Reply, ...])


def encode(replies: tuple[Reply, ...]) -> bytes:
    return _encoder.encode(replies) if replies else b""


def decode(raw: bytes) -> tuple[Reply, ...]:
    """Nothing of what is none of ours."""
    try:
        return _decoder.decode(raw) if raw else ()
    except msgspec.MsgspecError:
        return ()


def newest(replies: Iterable[Reply]) -> tuple[Reply, ...]:
    """As many of these as one conversation may keep; they come oldest first, and stay so."""
    return tuple(reversed(list(_within_bounds(dict.fromkeys(replies)))))


def _within_bounds(replies: dict[Reply, None]) -> Iterator[Reply]:
    left = MOST_BYTES
    for reply in list(reversed(replies))[:MOST_REPLIES]:
        left -= reply.cost_bytes
        if left < 0:
            return
        yield reply


class Replies(Generic[T]):
    """Who knows a reply, by each of its keys."""

    def __init__(self) -> None:
        self._known: dict[str, dict[T, Reply]] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._known)

    def put(self, owner: T, replies: Iterable[Reply]) -> None:
        for reply in replies:
            for key in reply.keys:
                known = self._known.setdefault(key, {})
                known.pop(owner, None)  # put again, it is the newest
                known[owner] = reply

    def drop(self, owner: T, replies: Iterable[Reply]) -> None:
        for key in {key for reply in replies for key in reply.keys}:
            known = self._known.get(key, {})
            known.pop(owner, None)
            if not known:
                self._known.pop(key, None)

    def find(self, key: str) -> list[tuple[T, Reply]]:
        """The newest first."""
        known = self._known.get(key, {})
        return [(owner, known[owner]) for owner in islice(reversed(known), MOST_FOUND)]
