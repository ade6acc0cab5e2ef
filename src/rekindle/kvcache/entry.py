"""A conversation that is remembered. Blocks are derived and may vanish; an entry is a promise.

It knows its tokens, the rendered text that they stand for, its replies and its names.
"""

from __future__ import annotations

from dataclasses import dataclass

from rekindle.kvcache.block import PrefixHandle
from rekindle.kvcache.clock import Clock
from rekindle.kvcache.replies import Reply
from rekindle.tokens import Tokens

Name = tuple[str, str]  # kind and name
Segments = tuple[tuple[str, str], ...]

OVERHEAD_BYTES = 2048  # of an entry beside its tokens, its text and its replies


class Entry(PrefixHandle):
    """The end of a conversation, named by a client or kept automatically."""

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

    def __init__(
        self, key: str, namespace: bytes, tokens: Tokens, text: bytes, clock: Clock
    ) -> None:
        super().__init__(namespace, tokens)
        self.key = key
        self.text = text  # rendered bytes that its tokens stand for; empty when unknown
        self.text_tokens = len(tokens)  # how many of them the text stands for
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
        """Whether nobody could ask for it, so that a longer conversation may take its place."""
        return not (self.keyed or self.names or self.pinned)

    @property
    def cost_bytes(self) -> int:
        replies = sum(reply.cost_bytes for reply in self.replies)
        return len(self.tokens.packed) + len(self.text) + replies + OVERHEAD_BYTES

    def first(self, count: int) -> list[int]:
        """Its first so many token ids."""
        return self.tokens[:count].ids()

    def expires_in_s(self, clock: Clock) -> float | None:
        """The time it has left; None: it has no end, as nothing has that is pinned."""
        if self.ttl_s is None or self.pinned:
            return None
        return self.used_s + self.ttl_s - clock.steady_s()


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """The end of a conversation that is to be remembered."""

    namespace: bytes
    tokens: Tokens
    text: bytes
    text_tokens: int | None = None  # how many tokens the text stands for; None: all
    replies: tuple[Reply, ...] = ()
    after: Entry | None = None  # what it goes on from, where its text does not show it
    segments: Segments = ()
    names: tuple[Name, ...] = ()
    ttl_s: float | None = None
    keyed: bool = False
    pinned: bool = False
    durable: bool = True
    is_computed: bool = True
