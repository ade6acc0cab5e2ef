"""The tokens of a prompt: ids, and for spans that are pictures what is in the picture.

Chat makes them, the cache compares and hashes them, engines compute them; so this file imports
nothing of ours. A picture takes ids that no vocabulary has, drawn from its digest: equal pictures
have equal ids wherever they came from, so comparing, hashing and storing need no case for them
(decision 14).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from blake3 import blake3

TOKEN_BYTES = 4
MEDIA_BIT = 1 << 31  # set in the ids of pictures alone
LEAST_MEDIA_TOKENS = 4  # fewer would hold too little of a digest to tell pictures apart


class Tokenizer(Protocol):
    """A model's vocabulary. Any thread may call it."""

    @property
    def size(self) -> int:
        """Ids go from 0 to one less."""

    @property
    def bos(self) -> int | None:
        """The token put in front of a prompt when `add_bos`."""

    @property
    def eos(self) -> int | None: ...

    @property
    def add_bos(self) -> bool: ...

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens by which the model ends its turn."""

    @property
    def control_texts(self) -> Mapping[str, int]:
        """The text of every control token."""

    @property
    def longest_bytes(self) -> int:
        """The most bytes of text that one token can stand for."""

    def text(self, token: int | None) -> str:
        """The token as the vocabulary spells it; empty for none."""

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Tokens without BOS; control-token text becomes control tokens only when `special`."""

    def piece(self, token: int, *, special: bool) -> bytes:
        """The bytes of a token; a control token has none unless `special`."""


@dataclass(frozen=True, slots=True)
class Media:
    """A span of tokens that is a picture."""

    start: int  # its first token
    length: int  # in tokens
    positions: int  # that it takes in the model's position encoding, often fewer than tokens
    digest: bytes  # of the decoded, resized pixels

    @property
    def stop(self) -> int:
        return self.start + self.length

    def ids(self) -> bytes:
        """Its ids, packed: the digest, stretched to its length."""
        words = np.frombuffer(blake3(self.digest).digest(length=self.length * TOKEN_BYTES), ">u4")
        return (words | MEDIA_BIT).astype(">u4").tobytes()


def pack(ids: Iterable[int]) -> bytes:
    """Ids as bytes, big-endian, so that byte order is token order."""
    return np.fromiter(ids, dtype=">u4").tobytes()


class Tokens:
    """An immutable run of tokens; slicing and comparing cost what they cost on bytes."""

    __slots__ = ("media", "packed")

    def __init__(self, packed: bytes = b"", media: tuple[Media, ...] = ()) -> None:
        self.packed = packed
        self.media = media  # in order, none overlapping

    @classmethod
    def of(cls, ids: Iterable[int]) -> Tokens:
        return cls(pack(ids))

    @classmethod
    def of_media(cls, digest: bytes, length: int, positions: int) -> Tokens:
        """The tokens of one picture."""
        if length < LEAST_MEDIA_TOKENS:
            raise ValueError(f"a picture takes at least {LEAST_MEDIA_TOKENS} tokens")
        media = Media(0, length, positions, digest)
        return cls(media.ids(), (media,))

    def ids(self) -> list[int]:
        found: list[int] = np.frombuffer(self.packed, dtype=">u4").tolist()
        return found

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids())

    def __len__(self) -> int:
        return len(self.packed) // TOKEN_BYTES

    @property
    def positions(self) -> int:
        """What they take in the model's position encoding."""
        return len(self) + sum(each.positions - each.length for each in self.media)

    def __getitem__(self, span: slice) -> Tokens:
        """A part of them; a picture that is cut leaves its ids, and is no picture any more."""
        if span.step not in (None, 1):
            raise ValueError("tokens are cut in one piece")
        first, last = span.start, span.stop
        packed = self.packed[
            first and first * TOKEN_BYTES : None if last is None else last * TOKEN_BYTES
        ]
        if not self.media:
            return Tokens(packed)
        start, stop, _ = span.indices(len(self))
        return Tokens(packed, self._media_within(start, stop))

    def _media_within(self, start: int, stop: int) -> tuple[Media, ...]:
        inside = (each for each in self.media if start <= each.start and each.stop <= stop)
        return tuple(replace(each, start=each.start - start) for each in inside)

    def __add__(self, other: Tokens) -> Tokens:
        moved = (replace(each, start=each.start + len(self)) for each in other.media)
        return Tokens(self.packed + other.packed, (*self.media, *moved))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokens) and self.packed == other.packed

    def __hash__(self) -> int:
        return hash(self.packed)

    def __repr__(self) -> str:
        return f"Tokens({self.ids()!r})" if len(self) < 16 else f"Tokens(<{len(self)} tokens>)"

    def startswith(self, other: Tokens) -> bool:
        return self.packed.startswith(other.packed)

    def common_prefix(self, other: Tokens) -> int:
        """How many leading tokens both have; a picture is in it whole, or not at all."""
        shared = common_prefix(self.packed, other.packed)
        for each in (self, other):
            if each.media:
                shared = each.whole_media(shared)
        return shared

    def with_media(self, media: Iterable[Media]) -> Tokens | None:
        """These ids with the pictures that they hold, in order; None when they hold others."""
        is_media = np.frombuffer(self.packed, dtype=">u4") >= MEDIA_BIT
        places = np.flatnonzero(is_media)
        found: list[Media] = []
        at = 0  # in the places
        for each in media:
            if at >= len(places):
                return None
            start = int(places[at])
            ids = self.packed[start * TOKEN_BYTES : (start + each.length) * TOKEN_BYTES]
            if ids != each.ids():
                return None
            found.append(replace(each, start=start))
            at += each.length
        return Tokens(self.packed, tuple(found)) if at == len(places) else None

    def whole_media(self, count: int) -> int:
        """The most tokens, up to `count`, at which no picture is cut."""
        cut = (each.start for each in self.media if each.start < count < each.stop)
        return next(cut, count)


class TokenBuffer:
    """Tokens that grow by what is sampled."""

    __slots__ = ("_ids", "_packed", "length", "media")

    def __init__(self, tokens: Tokens) -> None:
        self._packed = bytearray(tokens.packed)
        # No list: the ids of a long prompt would be as many objects, of which few are ever read.
        self._ids = array("I", np.frombuffer(tokens.packed, ">u4").astype(np.uintc).tobytes())
        self.media = tokens.media
        self.length = len(self._ids)  # not counted again for each of many questions a token

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)

    @property
    def last(self) -> int:
        return self._ids[-1]

    @property
    def ids(self) -> list[int]:
        return self._ids.tolist()

    def part(self, start: int, stop: int | None = None) -> list[int]:
        """The ids of some of them."""
        return self._ids[start:stop].tolist()

    @property
    def text_ids(self) -> Sequence[int]:
        """Without those of pictures, which no vocabulary has."""
        return [token for token in self._ids if token < MEDIA_BIT] if self.media else self._ids

    def media_from(self, token: int) -> Media | None:
        """The first picture that ends after a token."""
        return next((each for each in self.media if token < each.stop), None)

    def whole_media(self, count: int) -> int:
        return Tokens(b"", self.media).whole_media(count)

    def append(self, token: int) -> None:
        self._ids.append(token)
        self._packed += token.to_bytes(TOKEN_BYTES, "big")
        self.length += 1

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.append(token)

    def first(self, count: int) -> Tokens:
        """The first so many, as they are now."""
        if count < len(self) and self.media:
            return Tokens(bytes(self._packed), self.media)[:count]
        with memoryview(self._packed) as packed:  # or a slice would be copied twice
            return Tokens(bytes(packed[: count * TOKEN_BYTES]), self.media)

    def all(self) -> Tokens:
        return self.first(len(self))

    def common_prefix(self, other: TokenBuffer) -> int:
        """How many leading tokens both have, with whole pictures; copies neither."""
        shared = common_prefix(self._packed, other._packed)
        for each in (self, other):
            if each.media:
                shared = each.whole_media(shared)
        return shared


def common_prefix(one: bytes | bytearray, other: bytes | bytearray) -> int:
    """How many leading tokens two packed runs have in common."""
    most = min(len(one), len(other)) // TOKEN_BYTES
    if not most:
        return 0
    differ = np.frombuffer(one, np.uint32, most) != np.frombuffer(other, np.uint32, most)
    first = int(differ.argmax())  # 0 also when nothing differs
    return first if differ[first] else most


def common_bytes(one: bytes, other: bytes) -> int:
    """How many leading bytes two texts have in common."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    differ = np.frombuffer(one, np.uint8, most) != np.frombuffer(other, np.uint8, most)
    return int(differ.argmax())


def common_length(one: Sequence[object], other: Sequence[object]) -> int:
    """How many leading items two sequences have in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
