"""Defines an entry: a remembered conversation. Blocks may vanish, but an entry is a promise.

It has tokens, the rendered text that they stand for, replies and names. It may have a document that
a client stored. An entry with only a document has no tokens.
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

MAX_REPLIES = 256  # per conversation; the newest are kept
MAX_REPLY_BYTES = 1 << 20  # of all replies of a conversation


class Clock:
    """A monotonic clock for lifetimes, and a wall clock for people and restarts."""

    def steady_s(self) -> float:
        """Seconds that never go backward and mean nothing after a restart."""
        return time.monotonic()

    def wall_s(self) -> float:
        """Seconds since 1970."""
        return time.time()


class Reply(Struct, frozen=True, array_like=True):
    """One reply in a conversation. Unknown positions are zero.

    `prompt_bytes` of the text and `prompt_tokens` are the prompt of the reply. With the reply it
    has `end_tokens`, and `end_bytes` if the reply is plain text.
    """

    keys: tuple[str, ...]
    message: bytes  # as JSON; empty for plain text
    prompt_bytes: int = 0
    prompt_tokens: int = 0
    end_tokens: int = 0
    end_bytes: int = 0

    @property
    def cost_bytes(self) -> int:
        return len(self.message) + sum(map(len, self.keys)) + 64

    def kept(self, common_bytes: int, common_tokens: int) -> Reply | None:
        """The reply with the positions that are valid in a conversation with this common prefix, or
        None if nothing is left."""
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
    """Concatenate length-prefixed replies, so that a new reply only appends bytes."""
    packed = map(_reply_encoder.encode, replies)
    return b"".join(len(each).to_bytes(_LENGTH_BYTES, "big") + each for each in packed)


def decode_replies(raw: bytes) -> tuple[Reply, ...]:
    """Decode replies. Returns none if the bytes are invalid."""
    try:
        if raw[:1] > b"\0":  # a list of an earlier version; a length never begins like this
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
    """The newest replies within the limits of a conversation, oldest first.

    Beyond the limits a quarter is dropped together, so that the stored pieces of the rest stay
    unchanged for many turns.
    """
    known = list(dict.fromkeys(replies))
    if len(known) <= MAX_REPLIES and sum(reply.cost_bytes for reply in known) <= MAX_REPLY_BYTES:
        return tuple(known)
    costs = accumulate(reply.cost_bytes for reply in reversed(known))
    fitting = sum(1 for _ in takewhile(lambda cost: cost <= MAX_REPLY_BYTES * 3 // 4, costs))
    kept = min(fitting, MAX_REPLIES * 3 // 4)
    return tuple(known[len(known) - kept :])


class Entry(PrefixHandle):
    """A conversation that a client named or that is kept automatically."""

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
        self.text = text  # the rendered bytes of its tokens; empty if unknown
        self.text_tokens = len(tokens)  # number of tokens that the text stands for
        self.replies: tuple[Reply, ...] = ()  # oldest first
        self.document = b""  # stored with it by a dialect
        self.segments: Segments = ()
        self.names: dict[Name, None] = {}  # oldest first
        self.keyed = False  # a client was given its key
        self.durable = True  # survives restarts
        self.was_computed = True  # False if it was only announced
        self.hits = 0
        self.place = 0  # position in the LRU order; 0 if it was removed
        self.ttl_s: float | None = None
        self.pinned_until_s: float | None = None  # on the monotonic clock; None for a permanent pin
        self.created_at = self.last_used_at = clock.wall_s()
        self.used_s = clock.steady_s()

    @property
    def is_free(self) -> bool:
        """Whether nobody can name it, so that a longer conversation may replace it."""
        return not (self.keyed or self.names or self.pinned)

    @property
    def is_pinned_for_good(self) -> bool:
        return self.pinned and self.pinned_until_s is None

    def pin_until(self, at_s: float) -> None:
        """Pin it temporarily, or extend a temporary pin. A permanent pin stays."""
        if not self.is_pinned_for_good:
            self.pinned, self.pinned_until_s = True, max(self.pinned_until_s or at_s, at_s)

    def end_pin(self, at_s: float) -> None:
        """End a temporary pin that is over at this time."""
        if self.pinned_until_s is not None and self.pinned_until_s <= at_s:
            self.pinned, self.pinned_until_s = False, None

    @property
    def cost_bytes(self) -> int:
        replies = sum(reply.cost_bytes for reply in self.replies)
        texts = 2 * len(self.text)  # the text index has a copy
        return len(self.tokens.packed) + texts + replies + len(self.document) + 2048

    def first(self, count: int) -> list[int]:
        """Its first `count` token ids."""
        return self.tokens[:count].ids()

    def use(self, clock: Clock) -> None:
        """Restart its lifetime."""
        self.used_s = clock.steady_s()
        self.last_used_at = clock.wall_s()

    def expires_in_s(self, clock: Clock) -> float | None:
        """The remaining lifetime, or None if it does not expire or is pinned."""
        if self.ttl_s is None or self.pinned:
            return None
        return self.used_s + self.ttl_s - clock.steady_s()

    def has_expired(self, clock: Clock) -> bool:
        left = self.expires_in_s(clock)
        return left is not None and left <= 0

    def expires_at(self, clock: Clock) -> float | None:
        """The time of expiry on the wall clock."""
        left = self.expires_in_s(clock)
        return None if left is None else clock.wall_s() + left


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A conversation that is to be remembered."""

    namespace: bytes  # of the tenant
    kv_namespace: bytes | None = None  # of its state, if not the tenant's default
    key: str | None = None  # None for a random one, or that of an equal conversation
    tokens: Tokens = field(default_factory=Tokens)
    text: bytes = b""
    text_tokens: int | None = None  # number of tokens that the text stands for; None for all
    replies: tuple[Reply, ...] = ()
    after: Entry | None = None  # the entry that it continues, if its text does not show it
    segments: Segments = ()
    names: tuple[Name, ...] = ()
    ttl_s: float | None = None
    keyed: bool = False
    pinned: bool = False
    pin_s: float | None = None  # duration of a temporary pin
    durable: bool = True
    is_computed: bool = True
