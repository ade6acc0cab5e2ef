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


def cost_bytes(tokens: Tokens, text: bytes, reply_bytes: int = 0) -> int:
    """The memory of an entry without a document. The text index has a copy of the text."""
    return len(tokens.packed) + 2 * len(text) + reply_bytes + 2048


@dataclass(slots=True, eq=False, repr=False, kw_only=True)
class Entry(PrefixHandle):
    """A conversation that a client named or that is kept automatically."""

    key: str
    text: bytes  # the rendered bytes of its tokens; empty if unknown
    text_tokens: int  # number of tokens that the text stands for
    created_at: float
    last_used_at: float
    used_s: float  # on the monotonic clock
    replies: tuple[Reply, ...] = ()  # oldest first
    reply_bytes: int = 0  # the cost of all replies
    document: bytes = b""  # stored with it by a dialect
    pictures: tuple[bytes, ...] = ()  # the digests of its images
    segments: Segments = ()
    names: dict[Name, None] = field(default_factory=dict)  # oldest first
    keyed: bool = False  # a client was given its key
    durable: bool = True  # survives restarts
    was_computed: bool = True  # False if it was only announced
    hits: int = 0
    place: int = 0  # position in the LRU order; 0 if it was removed
    ttl_s: float | None = None
    pinned_until_s: float | None = None  # on the monotonic clock; only of a temporary pin
    pin_expires: bool = False  # it expires by its TTL although it is pinned

    @property
    def is_free(self) -> bool:
        """Whether nobody can name it, so that a longer conversation may replace it."""
        return not (self.keyed or self.names or self.pinned)

    @property
    def is_pinned_for_good(self) -> bool:
        return self.has_own_pin and not self.pin_expires

    @property
    def has_own_pin(self) -> bool:
        """Whether a client pinned it, for good or for its TTL. A turn pins temporarily."""
        return self.pinned and self.pinned_until_s is None

    def pin(self, *, expires: bool) -> None:
        """Pin it for good, or for its TTL."""
        self.pinned, self.pinned_until_s, self.pin_expires = True, None, expires

    def pin_until(self, at_s: float) -> None:
        """Pin it temporarily, or extend a temporary pin. A client's own pin stays."""
        if not self.has_own_pin:
            self.pinned, self.pinned_until_s = True, max(self.pinned_until_s or at_s, at_s)

    def unpin(self) -> None:
        self.pinned, self.pinned_until_s, self.pin_expires = False, None, False

    def end_pin(self, at_s: float) -> None:
        """End a temporary pin that is over at this time."""
        if self.pinned_until_s is not None and self.pinned_until_s <= at_s:
            self.unpin()

    @property
    def due_s(self) -> float | None:
        """When it expires or its temporary pin ends, on the monotonic clock."""
        if self.ttl_s is None or (self.pinned and not self.pin_expires):
            return self.pinned_until_s
        return self.used_s + self.ttl_s

    @property
    def cost_bytes(self) -> int:
        return cost_bytes(self.tokens, self.text, self.reply_bytes) + len(self.document)

    def first(self, count: int) -> list[int]:
        """Its first `count` token ids."""
        return self.tokens[:count].ids()

    def use(self, clock: Clock) -> None:
        """Restart its lifetime."""
        self.used_s = clock.steady_s()
        self.last_used_at = clock.wall_s()

    def expires_in_s(self, clock: Clock) -> float | None:
        """The remaining lifetime, or None if it does not expire."""
        if self.ttl_s is None or (self.pinned and not self.pin_expires):
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
    names: tuple[Name, ...] = ()  # each stands for one conversation
    shared_names: tuple[Name, ...] = ()  # several conversations may use them
    ttl_s: float | None = None
    keyed: bool = False
    pinned: bool = False
    pin_s: float | None = None  # duration of a temporary pin
    durable: bool = True
    is_computed: bool = True
