"""Represents the tokens of a prompt: ids, and the pictures that take spans of them.

Chat makes tokens, the cache compares and hashes them, engines compute them, so this module imports
none of ours. A picture takes ids that no vocabulary has, derived from its digest. Equal pictures
have equal ids, so comparing, hashing and storing need no special case (decision 14).
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import Protocol

import numpy as np
from blake3 import blake3

TOKEN_BYTES = 4
MEDIA_BIT = 1 << 31  # set only in the ids of pictures
MIN_MEDIA_TOKENS = 4  # fewer ids would hold too little of a digest to tell pictures apart


#: Spellings of the tokens for filling in the middle, by family of models.
_PREFIX = ("<|fim_prefix|>", "<fim_prefix>", "<fim-prefix>", "<|code_prefix|>")
_SUFFIX = ("<|fim_suffix|>", "<fim_suffix>", "<fim-suffix>", "<|code_suffix|>")
_MIDDLE = ("<|fim_middle|>", "<fim_middle>", "<fim-middle>", "<|code_middle|>")
_REPOSITORY = ("<|repo_name|>", "<|reponame|>", "<reponame>")
_FILE = ("<|file_sep|>", "<file_sep>", "<|file_separator|>")


@dataclass(frozen=True, slots=True, kw_only=True)
class FimTokens:
    """The tokens with which a model was trained to fill a gap in a text."""

    prefix: int
    suffix: int
    middle: int
    repository: int | None = None  # before the name of a repository
    file: int | None = None  # before the name of a file

    @classmethod
    def named(cls, control_texts: Mapping[str, int]) -> FimTokens | None:
        """Find the tokens by their known spellings. None if the model lacks one of the first."""

        def find(spellings: tuple[str, ...]) -> int | None:
            return next((control_texts[each] for each in spellings if each in control_texts), None)

        prefix, suffix, middle = map(find, (_PREFIX, _SUFFIX, _MIDDLE))
        if prefix is None or suffix is None or middle is None:
            return None
        return cls(
            prefix=prefix,
            suffix=suffix,
            middle=middle,
            repository=find(_REPOSITORY),
            file=find(_FILE),
        )


class Tokenizer(Protocol):
    """A model's vocabulary. Thread-safe."""

    @property
    def size(self) -> int:
        """Number of ids."""

    @property
    def bos(self) -> int | None: ...

    @property
    def eos(self) -> int | None: ...

    @property
    def add_bos(self) -> bool:
        """Whether prompts begin with BOS."""

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens with which the model ends its turn."""

    @property
    def control_texts(self) -> Mapping[str, int]:
        """The text of every control token, and its id."""

    @property
    def fim(self) -> FimTokens | None:
        """The tokens for filling in the middle. None: the model has none."""

    @property
    def longest_bytes(self) -> int:
        """The most bytes of text that one token can encode."""

    def text(self, token: int | None) -> str:
        """The token as the vocabulary spells it. Empty for None."""

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Tokens without BOS. Only if `special`, texts of control tokens become control tokens."""

    def piece(self, token: int, *, special: bool) -> bytes:
        """The bytes of a token. A control token has none unless `special`."""


@dataclass(frozen=True, slots=True)
class Media:
    """A picture's span of tokens."""

    start: int
    length: int
    positions: int  # in the model's position encoding, often fewer than tokens
    digest: bytes  # of the decoded and resized pixels

    @property
    def stop(self) -> int:
        return self.start + self.length

    def ids(self) -> bytes:
        """Its packed ids: the digest, extended to the length."""
        words = np.frombuffer(blake3(self.digest).digest(length=self.length * TOKEN_BYTES), ">u4")
        return (words | MEDIA_BIT).astype(">u4").tobytes()


def pack(ids: Iterable[int]) -> bytes:
    """Ids as big-endian bytes, so that byte order is token order."""
    return np.fromiter(ids, dtype=">u4").tobytes()


class Tokens:
    """An immutable sequence of tokens. Slicing and comparing are as fast as on bytes."""

    __slots__ = ("media", "packed")

    def __init__(self, packed: bytes = b"", media: tuple[Media, ...] = ()) -> None:
        self.packed = packed
        self.media = media  # in order and without overlaps

    @classmethod
    def of(cls, ids: Iterable[int]) -> Tokens:
        return cls(pack(ids))

    @classmethod
    def of_media(cls, digest: bytes, length: int, positions: int) -> Tokens:
        if length < MIN_MEDIA_TOKENS:
            raise ValueError(f"a picture takes at least {MIN_MEDIA_TOKENS} tokens")
        media = Media(0, length, positions, digest)
        return cls(media.ids(), (media,))

    def ids(self) -> list[int]:
        found: list[int] = np.frombuffer(self.packed, dtype=">u4").tolist()
        return found

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids())

    def __len__(self) -> int:
        return len(self.packed) // TOKEN_BYTES

    def __getitem__(self, span: slice) -> Tokens:
        """A part of the tokens. A cut picture leaves its ids, but is no longer in `media`."""
        if span.step not in (None, 1):
            raise ValueError("tokens have no slices with a step")
        first, last = span.start, span.stop
        packed = self.packed[
            first and first * TOKEN_BYTES : None if last is None else last * TOKEN_BYTES
        ]
        if not self.media:
            return Tokens(packed)
        start, stop, _ = span.indices(len(self))
        inside = (each for each in self.media if start <= each.start and each.stop <= stop)
        return Tokens(packed, tuple(replace(each, start=each.start - start) for each in inside))

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
        """Number of leading tokens that are equal. It never cuts a picture."""
        shared = common_prefix(self.packed, other.packed)
        return whole_media(other.media, whole_media(self.media, shared))

    def with_media(self, media: Iterable[Media]) -> Tokens | None:
        """These ids with the pictures that they hold, in order, or None if they hold others."""
        is_media = np.frombuffer(self.packed, dtype=">u4") >= MEDIA_BIT
        places = np.flatnonzero(is_media)
        found: list[Media] = []
        at = 0  # index into `places`
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
        return whole_media(self.media, count)

    @property
    def pictures(self) -> tuple[bytes, ...]:
        """The digests of its pictures, each once."""
        return tuple(dict.fromkeys(each.digest for each in self.media))


class TokenBuffer:
    """Tokens that grow while a reply is sampled."""

    __slots__ = ("_ids", "_packed", "length", "media")

    def __init__(self, tokens: Tokens) -> None:
        self._packed = bytearray(tokens.packed)
        # An array instead of a list, which would be one object per token of a long prompt.
        self._ids = array("I", np.frombuffer(tokens.packed, ">u4").astype(np.uintc).tobytes())
        self.media = tokens.media
        self.length = len(self._ids)  # an attribute, because every step reads it several times

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
        return self._ids[start:stop].tolist()

    @property
    def text_ids(self) -> Sequence[int]:
        """The ids without those of pictures, which no vocabulary has."""
        return [token for token in self._ids if token < MEDIA_BIT] if self.media else self._ids

    def media_from(self, token: int) -> Media | None:
        """The first picture that ends after a token."""
        return next((each for each in self.media if token < each.stop), None)

    def whole_media(self, count: int) -> int:
        return whole_media(self.media, count)

    def append(self, token: int) -> None:
        self._ids.append(token)
        self._packed += token.to_bytes(TOKEN_BYTES, "big")
        self.length += 1

    def first(self, count: int) -> Tokens:
        """A copy of the first `count` tokens."""
        if count < len(self) and self.media:
            return Tokens(bytes(self._packed), self.media)[:count]
        with memoryview(self._packed) as packed:  # a slice of the bytearray would copy twice
            return Tokens(bytes(packed[: count * TOKEN_BYTES]), self.media)

    def all(self) -> Tokens:
        return self.first(len(self))

    def common_prefix(self, other: TokenBuffer) -> int:
        """Number of leading tokens that are equal, without cutting a picture. Copies nothing."""
        shared = common_prefix(self._packed, other._packed)
        return whole_media(other.media, whole_media(self.media, shared))


def whole_media(media: Sequence[Media], count: int) -> int:
    """The largest number of tokens, up to `count`, that cuts no picture."""
    return next((each.start for each in media if each.start < count < each.stop), count)


def common_prefix(one: bytes | bytearray, other: bytes | bytearray) -> int:
    """Number of leading tokens that are equal in two packed sequences."""
    most = min(len(one), len(other)) // TOKEN_BYTES
    if not most:
        return 0
    differ = np.frombuffer(one, np.uint32, most) != np.frombuffer(other, np.uint32, most)
    first = int(differ.argmax())  # 0 also if nothing differs
    return first if differ[first] else most


def common_bytes(one: bytes, other: bytes) -> int:
    """Number of leading bytes that are equal."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    differ = np.frombuffer(one, np.uint8, most) != np.frombuffer(other, np.uint8, most)
    return int(differ.argmax())


def common_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Number of leading items that are equal."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def any_of(texts: Iterable[str]) -> str:
    """A pattern for the longest of these texts that begins at a place."""
    return _any_of_sorted(sorted(set(texts)))


def _any_of_sorted(texts: list[str]) -> str:
    """A trie, because a vocabulary has thousands of texts."""
    if not texts:
        return r"(?!)"
    if len(texts) == 1:
        return re.escape(texts[0])
    shared = common_length(texts[0], texts[-1])  # sorted: a prefix of both ends is shared by all
    rests = [text[shared:] for text in texts]
    groups = groupby(filter(None, rests), itemgetter(0))
    branches = [_any_of_sorted(list(group)) for _, group in groups]
    optional = "?" if "" in rests else ""
    return f"{re.escape(texts[0][:shared])}(?:{'|'.join(branches)}){optional}"
