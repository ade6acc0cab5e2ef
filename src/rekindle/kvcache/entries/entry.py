"""A conversation that is remembered. Blocks are derived and may vanish; an entry is a promise.

It knows its tokens, the rendered text that they stand for, its replies and its names. What a client
stored on purpose is its document; an entry of nothing else has no tokens.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, takewhile

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from rekindle.kvcache.block import PrefixHandle
from rekindle.tokens import Tokens

Name = tuple[str, str]  # kind and name
Segments = tuple[tuple[str, str], ...]

OVERHEAD_BYTES = 2048  # of an entry beside its tokens, its text and its replies
MOST_REPLIES = 256  # of one conversation: the newest
MOST_REPLY_BYTES = 1 << 20  # that they take together
REPLY_OVERHEAD_BYTES = 64  # of a reply beside its message and its keys


class Clock:
    """Two clocks: one that never jumps, for lifetimes; one on the wall, for people and restarts."""

    def steady_s(self) -> float:
        """Seconds that only go forward, and mean nothing after a restart."""
        return time.monotonic()

    def wall_s(self) -> float:
        """Seconds since 1970, as far as this machine knows."""
        return time.time()


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
        return len(self.message) + sum(map(len, self.keys)) + REPLY_OVERHEAD_BYTES

    def kept(self, common_bytes: int, common_tokens: int) -> Reply | None:
        """What is true of it in a conversation that shares so much; None: nothing is."""
        if self.prompt_bytes > common_bytes or self.prompt_tokens > common_tokens:
            return Reply(self.keys, self.message) if self.message else None
        if self.end_bytes > common_bytes or self.end_tokens > common_tokens:
            return replace(self, end_tokens=0, end_bytes=0)
        return self


_reply_encoder = msgspec.msgpack.Encoder()
_reply_decoder = msgspec.msgpack.Decoder(Reply)
_list_decoder = msgspec.msgpack.Decoder(tuple[Reply, ...])
_LENGTH_BYTES = 4


def encode_replies(replies: tuple[Reply, ...]) -> bytes:
    """One after the other, each with its length before it: what one more adds comes at the end."""
    packed = map(_reply_encoder.encode, replies)
    return b"".join(len(each).to_bytes(_LENGTH_BYTES, "big") + each for each in packed)


def decode_replies(raw: bytes) -> tuple[Reply, ...]:
    """The replies; none when the bytes are not what we wrote."""
    try:
        if raw[:1] > b"\0":  # a list, as earlier versions wrote it: no length begins like this
            return _list_decoder.decode(raw)
        return tuple(_decoded(raw))
    except msgspec.MsgspecError:
        return ()


def _decoded(raw: bytes) -> Iterator[Reply]:
    start = 0
    while start < len(raw):
        begin = start + _LENGTH_BYTES
        start = begin + int.from_bytes(raw[start:begin], "big")
        yield _reply_decoder.decode(raw[begin:start])


def newest_replies(replies: Iterable[Reply]) -> tuple[Reply, ...]:
    """As many of these as one conversation may keep; they come oldest first, and stay so.

    Beyond the bounds a quarter goes at once: what is stored of the rest then stays as it is for
    many turns.
    """
    known = list(dict.fromkeys(replies))
    if len(known) <= MOST_REPLIES and sum(map(_cost_bytes, known)) <= MOST_REPLY_BYTES:
        return tuple(known)
    costs = accumulate(map(_cost_bytes, reversed(known)))
    fitting = sum(1 for _ in takewhile(lambda cost: cost <= MOST_REPLY_BYTES * 3 // 4, costs))
    kept = min(fitting, MOST_REPLIES * 3 // 4)
    return tuple(known[len(known) - kept :])


def _cost_bytes(reply: Reply) -> int:
    return reply.cost_bytes


class Entry(PrefixHandle):
    """The end of a conversation, named by a client or kept automatically."""

    __slots__ = (
        "created_at",
        "document",
        "durable",
        "hits",
        "key",
        "keyed",
        "last_used_at",
        "names",
        "pinned_until_s",
        "place",
        "replies",
        "segments",
        "text",
        "text_tokens",
        "ttl_s",
        "used_s",
        "was_computed",
    )

    def __init__(
        self,
        key: str,
        namespace: bytes,
        tokens: Tokens,
        text: bytes,
        clock: Clock,
        *,
        tenant: bytes | None = None,
    ) -> None:
        super().__init__(namespace, tokens, tenant=tenant)
        self.key = key
        self.text = text  # rendered bytes that its tokens stand for; empty when unknown
        self.text_tokens = len(tokens)  # how many of them the text stands for
        self.replies: tuple[Reply, ...] = ()  # oldest first
        self.document = b""  # what a dialect stores with it
        self.segments: Segments = ()
        self.names: dict[Name, None] = {}  # oldest first
        self.keyed = False  # a client was given its key
        self.durable = True  # to be remembered across restarts
        self.was_computed = True  # else it was only noted
        self.hits = 0
        self.place = 0  # in the order of last uses; 0: nowhere
        self.ttl_s: float | None = None
        self.pinned_until_s: float | None = None  # on the steady clock; None: until it is unpinned
        self.created_at = self.last_used_at = clock.wall_s()
        self.used_s = clock.steady_s()

    @property
    def is_free(self) -> bool:
        """Whether nobody could ask for it, so that a longer conversation may take its place."""
        return not (self.keyed or self.names or self.pinned)

    @property
    def is_pinned_for_good(self) -> bool:
        return self.pinned and self.pinned_until_s is None

    def pin_until(self, at_s: float) -> None:
        """Pin it for a while, or for longer; what is pinned for good stays so."""
        if not self.is_pinned_for_good:
            self.pinned, self.pinned_until_s = True, max(self.pinned_until_s or at_s, at_s)

    def end_pin(self, at_s: float) -> None:
        """Unpin it if it is pinned for a while that ends by then."""
        if self.pinned_until_s is not None and self.pinned_until_s <= at_s:
            self.pinned, self.pinned_until_s = False, None

    @property
    def cost_bytes(self) -> int:
        replies = sum(reply.cost_bytes for reply in self.replies)
        texts = 2 * len(self.text)  # the index by text has a copy
        return len(self.tokens.packed) + texts + replies + len(self.document) + OVERHEAD_BYTES

    def first(self, count: int) -> list[int]:
        """Its first so many token ids."""
        return self.tokens[:count].ids()

    def use(self, clock: Clock) -> None:
        """Its time begins again."""
        self.used_s = clock.steady_s()
        self.last_used_at = clock.wall_s()

    def expires_in_s(self, clock: Clock) -> float | None:
        """The time it has left; None: it does not expire, as nothing does that is pinned."""
        if self.ttl_s is None or self.pinned:
            return None
        return self.used_s + self.ttl_s - clock.steady_s()

    def has_expired(self, clock: Clock) -> bool:
        left = self.expires_in_s(clock)
        return left is not None and left <= 0

    def expires_at(self, clock: Clock) -> float | None:
        """When that is on the wall clock."""
        left = self.expires_in_s(clock)
        return None if left is None else clock.wall_s() + left


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """The end of a conversation that is to be remembered."""

    namespace: bytes  # of the tenant
    kv_namespace: bytes | None = None  # of its state; None: the tenant's
    key: str | None = None  # that it is to have; None: one at random, or that of an equal one
    tokens: Tokens = field(default_factory=Tokens)
    text: bytes = b""
    text_tokens: int | None = None  # how many tokens the text stands for; None: all
    replies: tuple[Reply, ...] = ()
    after: Entry | None = None  # what it goes on from, where its text does not show it
    segments: Segments = ()
    names: tuple[Name, ...] = ()
    ttl_s: float | None = None
    keyed: bool = False
    pinned: bool = False
    pin_s: float | None = None  # pinned for so long
    durable: bool = True
    is_computed: bool = True
