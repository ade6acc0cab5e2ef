"""A conversation head that is remembered. Blocks are derived and may vanish; an entry is a promise.

It knows its tokens, the rendered text that they stand for, its replies and its names.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rekindle.kvcache.clock import Clock
from rekindle.kvcache.handles import Head
from rekindle.kvcache.key import TOKEN_BYTES, unpack
from rekindle.kvcache.replies import Reply

Name = tuple[str, str]  # kind and name
Segments = tuple[tuple[str, str], ...]

OVERHEAD_BYTES = 2048  # of an entry beside its tokens, its text and its replies


class Entry(Head):
    """A named or automatic conversation head."""

    __slots__ = (
        "created_at",
        "durable",
        "hits",
        "key",
        "keyed",
        "last_used_at",
        "names",
        "replies",
        "segments",
        "text",
        "text_tokens",
        "ttl_s",
        "used_s",
        "was_computed",
    )

    def __init__(self, key: str, root: bytes, packed: bytes, text: bytes, clock: Clock) -> None:
        super().__init__(root, packed)
        self.key = key
        self.text = text  # rendered bytes that its tokens stand for; empty when unknown
        self.text_tokens = self.tokens  # how many of them the text stands for
        self.replies: tuple[Reply, ...] = ()  # oldest first
        self.segments: Segments = ()
        self.names: dict[Name, None] = {}  # oldest first
        self.keyed = False  # a client was given its key
        self.durable = True  # to be remembered across restarts
        self.was_computed = True  # else it was only noted
        self.hits = 0
        self.ttl_s: float | None = None
        self.created_at = self.last_used_at = clock.wall_s()
        self.used_s = clock.steady_s()

    @property
    def is_free(self) -> bool:
        """Whether nobody could ask for it, so that a longer head may take its place."""
        return not (self.keyed or self.names or self.pinned)

    @property
    def cost_bytes(self) -> int:
        told = sum(reply.cost_bytes for reply in self.replies)
        return len(self.packed) + len(self.text) + told + OVERHEAD_BYTES

    def first(self, tokens: int) -> list[int]:
        """Its first so many tokens."""
        return unpack(self.packed[: tokens * TOKEN_BYTES])

    def expires_in_s(self, clock: Clock) -> float | None:
        """The time it has left; None: it has no end, as nothing has that is pinned."""
        if self.ttl_s is None or self.pinned:
            return None
        return self.used_s + self.ttl_s - clock.steady_s()


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A head to be remembered."""

    root: bytes
    packed: bytes
    text: bytes
    text_tokens: int | None = None  # how many tokens the text stands for; None: all
    replies: tuple[Reply, ...] = ()
    after: Entry | None = None  # the head that it goes on from, where its text does not show it
    segments: Segments = ()
    names: tuple[Name, ...] = ()
    ttl_s: float | None = None
    keyed: bool = False
    pinned: bool = False
    durable: bool = True
    is_computed: bool = True


def common_bytes(one: bytes, other: bytes) -> int:
    """How many leading bytes two texts share."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    differ = np.frombuffer(one, np.uint8, most) != np.frombuffer(other, np.uint8, most)
    return int(differ.argmax())
